"""gRPC: ``fastgen.proto``, its conversion to Python objects, and the server."""

import os

# Without this, gRPC's library writes a line to standard error for each failed TLS handshake. If standard error is a
# full pipe, the library's threads block there, and the server cannot end. The library reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
