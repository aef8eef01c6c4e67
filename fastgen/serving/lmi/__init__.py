"""Configurations of LMI containers."""
