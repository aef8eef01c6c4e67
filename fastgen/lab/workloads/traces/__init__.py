"""Traces of real traffic: when requests came, how long they were, and what they shared."""
