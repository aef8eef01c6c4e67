"""Texts encoded by tokenizers that may take long for some of them, with limited time and memory."""
