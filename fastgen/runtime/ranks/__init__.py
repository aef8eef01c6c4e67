"""Ranks: processes that share a model, led by the one that schedules."""
