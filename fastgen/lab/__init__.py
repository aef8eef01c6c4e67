"""The policy lab: measures, simulates and plans."""
