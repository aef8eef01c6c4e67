"""Sums of a stream and a branch."""
