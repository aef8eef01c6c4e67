"""The engine in a process of its own, and the server's client for it."""
