"""Turns sampled tokens into the answers of requests."""
