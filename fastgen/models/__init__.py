"""Turns a recipe and a checkpoint into a model with its weights in place."""
