"""Sends the requests of a workload, and measures what comes back."""
