"""Requests: sampling parameters, checks and deadlines, and the tokens sampled for them."""
