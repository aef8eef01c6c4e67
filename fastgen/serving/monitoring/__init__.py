"""Monitoring of a server: metrics, goodput, a live view, logs."""
