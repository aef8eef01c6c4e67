"""Chat templates, rendered with limited time and memory."""
