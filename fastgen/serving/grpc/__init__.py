"""gRPC: ``fastgen.proto``, its conversion to Python objects, and the server."""

import os

# gRPC's library itself writes a line to standard error for each failed TLS handshake. Where nobody reads that, all its
# threads would wait there, and the server could not end. It reads this variable when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
