"""Activations of feed-forward layers, gated or not."""
