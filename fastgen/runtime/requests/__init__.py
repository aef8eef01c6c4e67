"""Requests, their checks, deadlines and answers."""
