"""Sampling of the next tokens."""
