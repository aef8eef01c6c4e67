"""Trains the small built-in models on stories drawn from a grammar."""
