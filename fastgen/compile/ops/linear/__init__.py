"""Linear layers."""
