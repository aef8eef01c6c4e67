"""Tools for recipes: propose, explain and diff."""
