"""OpenAI's Responses API, without stored state: every request holds the whole conversation."""
