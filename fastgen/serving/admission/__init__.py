"""Admission control, the limits on single requests, and the prediction of times to the first token."""
