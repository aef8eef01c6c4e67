"""Results of other tools, as summaries like our own."""
