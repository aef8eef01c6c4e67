"""Several replicas of a model behind one server, as an application of Ray Serve.

Requests and their ends go through Ray: its router, its health checks, its scaling. Tokens do not: each replica sends
what a step of its engine gave in one message, over a socket of its own.
"""
