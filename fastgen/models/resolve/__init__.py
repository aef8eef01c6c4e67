"""Resolves a recipe and a config.json to a model spec."""
