"""Writing recipes: proposing one for a checkpoint, comparing two, explaining one."""
