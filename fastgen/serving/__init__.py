"""Serving: one engine in a process of its own, behind HTTP and gRPC."""
