"""What each rank holds of a model under tensor parallelism, as a model spec of its own."""
