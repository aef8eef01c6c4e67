"""Ragged-batch modules, built of ops. They know sizes and tensors, nothing of recipes or checkpoints."""
