"""From sampled tokens to the answers of requests."""
