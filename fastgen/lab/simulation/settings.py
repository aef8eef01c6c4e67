"""The settings of a simulated server: those of the engine that its scheduler decides by, and delays around it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.scheduling.policies import choose_policy, policy_name
from fastgen.runtime.scheduling.policies.policy import Policy
from fastgen.runtime.scheduling.waiting_queue import DEFAULT_AGING_S


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """One replica of a server. The defaults are those of :func:`fastgen.load` on a GPU."""

    # Blocks of the KV cache, the padding block included.
    num_blocks: int
    token_budget: int = 2048
    max_num_seqs: int = 256
    block_size: int = 16
    # For each KV group how many positions a token sees; ``None`` for all.
    windows: tuple[int | None, ...] = (None,)
    # Longest prompt and answer together; by default what the whole KV cache holds.
    max_model_len: int | None = None
    policy: str | Policy = "splitfuse"
    itl_target_ms: float | None = None
    aging_s: float = DEFAULT_AGING_S
    prefix_caching: bool = True
    # A kind of :mod:`fastgen.runtime.scheduling.reservations`: "request" or "context".
    kv_reservation: str | None = None
    # Whether the engine launches steps before the tokens of those before them are known, as it does on a GPU.
    runs_ahead: bool = False
    # Seconds between two steps in which the server does other things.
    step_gap_s: float = 0.0
    # Seconds for which a request that arrives keeps the engine from its steps: it is checked and queued.
    arrival_s: float = 0.0
    # Seconds from the sending of a request until the engine has it, and from a step's end until its tokens arrive.
    request_delay_s: float = 0.0
    token_delay_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_gap_s", "arrival_s", "request_delay_s", "token_delay_s"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(f"{name}={getattr(self, name)}: expected seconds, at least 0")
        choose_policy(self.policy, self.itl_target_ms)

    def facts(self) -> dict[str, Any]:
        """Returns all settings as JSON."""
        policy = choose_policy(self.policy, self.itl_target_ms)
        parameters = {name: getattr(policy, name) for name in policy.parameters}
        return asdict(self) | {"policy": policy_name(policy), "policy_parameters": parameters}
