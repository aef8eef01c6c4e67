"""The objects that compute a model's ops and hold its weights, for each backend."""
