"""Finds the recipe of an architecture."""
