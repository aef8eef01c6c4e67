"""Texts encoded by tokenizers with regular expressions of their own, with limited time and memory."""
