"""The time of a step: its work, and one model of what that work costs."""
