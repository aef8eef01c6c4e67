"""Who is let in, and when an answer to them would begin."""
