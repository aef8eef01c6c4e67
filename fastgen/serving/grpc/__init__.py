"""gRPC: ``fastgen.proto``, what it means in Python, and the server."""
