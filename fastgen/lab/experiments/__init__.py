"""Experiments: runs put together to answer a question."""
