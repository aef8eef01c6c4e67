"""Clients of servers, and the servers that a user has on a machine."""
