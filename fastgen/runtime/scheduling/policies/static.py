"""Static batching: batches of the requests that wait, without a delay for more."""

from __future__ import annotations

from fastgen.runtime.scheduling.policies.dynamic import DynamicBatching


class StaticBatching(DynamicBatching):
    """Batches of at most ``batch_size`` requests, by default ``max_num_seqs``. The next batch begins when all of the
    last one have finished.
    """

    parameters = ("batch_size",)

    def __init__(self, batch_size: int | None = None):
        super().__init__(batch_size, max_delay_s=0.0)
