"""Finds, reads and loads the files of a checkpoint."""
