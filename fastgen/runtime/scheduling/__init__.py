"""Scheduling: which sequences wait, which run, and how many tokens of each a step computes."""
