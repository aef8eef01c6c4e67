"""Which token comes next: parameters, the sampler, beams, and the shape an answer must have."""
