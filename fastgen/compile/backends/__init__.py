"""The backends that compute the ops of an engine."""
