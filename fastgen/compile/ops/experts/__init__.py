"""Mixtures of experts: routing, sorting, products and their sum."""
