"""Reproductions of published measurements of FastGen, vLLM and others, on the simulated device and on this machine."""
