"""Latent attention between its projections: norm, rotation and the cache write."""
