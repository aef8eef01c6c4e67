"""From the projections to attention: norms, rotation and the cache write."""
