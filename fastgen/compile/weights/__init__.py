"""Weight formats, and how weights are stored in them."""
