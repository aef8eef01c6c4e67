"""Compares two recipes."""
