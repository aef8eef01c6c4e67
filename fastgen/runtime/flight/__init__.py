"""The flight recorder and the readers of its recordings: why, replay, timeline."""
