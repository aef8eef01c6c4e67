"""The recipe language: YAML with positions, a typed schema and expressions."""
