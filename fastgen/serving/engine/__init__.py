"""The engine in its own process, and the server's side of it."""
