"""Who owns which blocks of the KV cache, what they contain, and who shares them."""
