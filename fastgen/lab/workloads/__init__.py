"""Workloads: what requests ask for, and when they arrive."""
