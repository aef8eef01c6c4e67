"""Plans: what a model takes on a device, how many requests it carries, and how fast it answers them."""
