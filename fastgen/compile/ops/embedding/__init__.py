"""Token and position embedding."""
