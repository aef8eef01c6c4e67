"""Serving: an engine in a process of its own, or several replicas, behind HTTP and gRPC."""
