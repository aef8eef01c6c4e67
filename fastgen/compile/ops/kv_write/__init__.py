"""Writes keys and values to the paged cache."""
