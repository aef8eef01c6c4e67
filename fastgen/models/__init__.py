"""From a recipe and a checkpoint to a model with its weights in place."""
