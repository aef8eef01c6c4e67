"""What is asked of a model: requests, their sampling parameters, checks and deadlines; and what is sampled for them."""
