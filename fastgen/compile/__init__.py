"""What runs on a device: ops, each with an executable torch reference."""
