"""Configurations of LMI containers: their properties and keys, translated to arguments."""
