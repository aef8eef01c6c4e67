"""Sums and gathers over the ranks of one machine."""
