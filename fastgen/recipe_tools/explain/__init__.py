"""Explains a recipe as a drawing and in sentences."""
