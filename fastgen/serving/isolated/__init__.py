"""Work on texts from clients that may take too long, in processes that can be stopped."""
