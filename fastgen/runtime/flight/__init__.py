"""The flight recorder, and what can be told from a recording: why, replay, the timeline."""
