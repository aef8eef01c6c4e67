"""The HTTP side of the server."""
