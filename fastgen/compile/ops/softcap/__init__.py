"""Soft caps of logits."""
