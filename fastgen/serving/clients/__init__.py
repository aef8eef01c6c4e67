"""Clients of servers, and the list of a user's servers on this machine."""
