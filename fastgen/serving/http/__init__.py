"""The server's HTTP side."""
