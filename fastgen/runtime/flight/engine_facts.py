"""The facts about the engine in a recording: all that decisions depend on."""

from __future__ import annotations

from fastgen.runtime.flight.recording import EngineFacts
from fastgen.runtime.scheduling.policies import policy_name
from fastgen.runtime.scheduling.scheduler import Scheduler


def engine_facts(scheduler: Scheduler, *, runs_ahead: bool = False, ranks: int = 1) -> EngineFacts:
    """Returns the sizes and rules that ``scheduler`` decides by. ``runs_ahead``: the engine launches steps ahead, on so
    many ``ranks``."""
    kv, policy = scheduler.kv, scheduler.policy
    return EngineFacts(
        token_budget=scheduler.token_budget,
        max_num_seqs=scheduler.max_num_seqs,
        block_size=kv.block_size,
        num_blocks=kv.pool.num_blocks,
        windows=kv.windows,
        max_chunk=kv.max_chunk,
        policy=policy_name(policy),
        policy_parameters={name: getattr(policy, name) for name in policy.parameters},
        aging_s=scheduler.waiting.aging_s,
        prefix_caching=kv.prefix_cache is not None,
        runs_ahead=runs_ahead,
        kv_reservation=scheduler.reservations.kind,
        max_model_len=scheduler.reservations.max_model_len,
        ranks=ranks,
    )
