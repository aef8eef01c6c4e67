"""Admission control, and the prediction of times to the first token."""
