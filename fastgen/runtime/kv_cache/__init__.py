"""The paged KV cache on the host: block ownership, sharing and the prefix cache."""
