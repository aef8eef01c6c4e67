"""The engine: requests, scheduling, the step, and the public face over them."""
