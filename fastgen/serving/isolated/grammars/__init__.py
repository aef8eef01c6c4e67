"""Trial compilation of answer formats in a process that can be stopped, before the engine sees them."""
