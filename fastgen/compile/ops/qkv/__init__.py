"""The work between the projections and attention: norms, rotation and the cache write."""
