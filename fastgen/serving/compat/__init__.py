"""Contracts of other servers."""
