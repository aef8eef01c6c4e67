"""What a request is told that ended because something failed which should not have."""

from __future__ import annotations

import torch

_LOWER = "lower token_budget, max_num_seqs, max_model_len or kv_cache_memory when loading"


def cause_of(error: Exception) -> str:
    """The text of ``error`` for the outputs of the requests that it ended, and where memory ran out what to do."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"out of memory, {_LOWER} ({text})" if _is_out_of_memory(error) else text


def _is_out_of_memory(error: Exception) -> bool:
    """On a CPU torch raises a mere ``RuntimeError``, whose text alone says so."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
