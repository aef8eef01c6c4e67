"""The machine: its device, its threads, its memory pages."""
