"""Chooses the next tokens: the sampler, beam search, and formats of answers."""
