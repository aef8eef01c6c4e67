"""Tensor parallelism: the model spec of each rank, derived from that of the whole model."""
