"""Devices that need not be here: what their datasheets say, and what a step costs on them."""
