"""Formats of answers are compiled where they can be stopped, before the engine sees them."""
