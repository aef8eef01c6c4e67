"""Chat templates, rendered where they can cost no more than they may."""
