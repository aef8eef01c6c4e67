"""gRPC: ``fastgen.proto``, its conversion to Python objects, and the server."""
