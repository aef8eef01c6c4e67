"""RMS and layer norms."""
