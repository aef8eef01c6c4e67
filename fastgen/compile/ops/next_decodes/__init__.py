"""The inputs of a decode step that follows another."""
