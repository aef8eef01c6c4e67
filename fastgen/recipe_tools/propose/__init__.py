"""Proposes a recipe for an unknown checkpoint."""
