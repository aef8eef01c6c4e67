"""A step carried out: from a schedule to a ragged batch, through the model, to a token for each row."""
