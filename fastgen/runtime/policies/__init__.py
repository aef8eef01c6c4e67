"""Scheduling policies: arithmetic only, one file each."""
