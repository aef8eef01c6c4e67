"""Records steps and replays them: CUDA graphs on a GPU, tapes elsewhere."""
