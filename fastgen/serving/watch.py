"""Passes the events of an engine to admission control and to the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastgen.compile.host.system import memory_bytes
from fastgen.runtime.metrics import Metrics
from fastgen.serving.admission.admission import Admission, Admitted
from fastgen.serving.admission.request_limits import max_logprob_bytes
from fastgen.serving.engine.messages import EngineFacts, Progress
from fastgen.serving.engine.request import EngineRequest
from fastgen.serving.monitoring.prometheus import ServerMetrics
from fastgen.serving.options import Limits


class Watch:
    """An ``EngineWatcher`` that updates :class:`Admission` and :class:`ServerMetrics`. ``is_up()`` returns whether
    requests are accepted.
    """

    def __init__(self, limits: Limits, is_up: Callable[[], bool]):
        self.metrics = ServerMetrics(is_up)
        self.admission = Admission(limits, self.metrics.refused, max_logprob_bytes=max_logprob_bytes(memory_bytes()))
        self._admitted: dict[EngineRequest, Admitted] = {}
        self._num_generated: dict[EngineRequest, int] = {}

    def submitted(self, request: EngineRequest, admitted: Admitted) -> None:
        """Records that ``request`` was sent to the engine."""
        self._admitted[request] = admitted

    def engine_ready(self, facts: EngineFacts, replica: str = "") -> None:
        self.admission.begin(facts, replica)

    def engine_counted(self, metrics: Metrics, replica: str = "") -> None:
        self.admission.observe(metrics, replica)
        self.metrics.observe(metrics, replica)

    def engine_away(self, replica: str = "") -> None:
        self.admission.end(replica)
        self.metrics.engine_away(replica)

    def engine_ended(self, replica: str = "") -> None:
        self.admission.end(replica)
        self.metrics.engine_ended(replica)

    def request_routed(self, request: EngineRequest, replica: str) -> None:
        if (admitted := self._admitted.get(request)) is not None:
            admitted.routed(replica)

    def request_started(self, request: EngineRequest) -> None:
        if (admitted := self._admitted.get(request)) is not None:
            admitted.started()

    def completion_ended(self, request: EngineRequest, progress: Progress) -> None:
        end = progress.end
        assert end is not None
        if end.reason not in ("stop", "length") or end.first_token_ago_s is None:
            return
        # The engine has its own clock, which does not cover the time before it received the request.
        ttft_s = time.monotonic() - end.first_token_ago_s - request.arrived_s
        gaps_s = end.metrics.gaps_s
        self.metrics.answered(request.num_prompt_tokens, ttft_s, gaps_s)
        if progress.index == 0:
            self._num_generated[request] = 1 + len(gaps_s)

    def request_gone(self, request: EngineRequest) -> None:
        num_generated = self._num_generated.pop(request, 0)
        if (admitted := self._admitted.pop(request, None)) is not None:
            admitted.ended(num_generated, is_whole=num_generated > 0)
