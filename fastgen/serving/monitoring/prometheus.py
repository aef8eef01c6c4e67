"""The metrics of a server in Prometheus' format: those of the engine and the server's own.

Every name begins with ``fastgen_``. The engine's names are those of :class:`fastgen.runtime.metrics.Metrics`. Its
counters restart with each new process. The last known counters of ended processes are added here, so that no total ever
decreases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import reduce
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client import Histogram as OwnHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fastgen.runtime.goodput import RATES, good_rates
from fastgen.runtime.metrics import REQUEST_BOUNDS_S, Metrics
from fastgen.serving.monitoring.totals import counters, total
from fastgen.serving.refusals import Refusal

PREFIX = "fastgen_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The engine's metrics that have a label, and the label.
LABELS = {"step_seconds": "size", "sequences_finished_total": "reason"}
# By the field names of :class:`Metrics`.
HELP = {
    "requests_running": "Requests with a sequence that has a slot.",
    "requests_waiting": "Requests in the engine without such a sequence.",
    "sequences_running": "Sequences that have a slot.",
    "sequences_waiting": "Sequences that wait for one.",
    "requests_total": "Requests that the engine took.",
    "sequences_finished_total": "Sequences that ended, by why.",
    "prompt_tokens_total": "Prompt tokens of the requests that the engine took.",
    "generation_tokens_total": "Tokens generated.",
    "computed_tokens_total": "Tokens forwarded, of prompts and of answers.",
    "padding_tokens_total": "Padding tokens forwarded to fill a step up to its size.",
    "prefix_cache_lookup_tokens_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hit_tokens_total": "Prompt tokens found there, and not computed.",
    "prefix_cache_evictions_total": "Blocks whose contents were given up for others.",
    "preemptions_total": "Sequences whose blocks were taken away, to be computed anew.",
    "kv_blocks": "Blocks of the KV cache.",
    "kv_blocks_held": "Blocks that sequences hold.",
    "kv_blocks_cached": "Blocks without a holder that the prefix cache may use again.",
    "itl_target_missed_total": "Steps with decodes that took longer than itl_target_ms.",
    "ranks": "Processes that share the model.",
    "rank_plans_total": "Plans that the first rank wrote for the others.",
    "rank_plan_bytes_total": "Bytes of these plans.",
    "rank_plan_seconds_total": "Seconds that writing them took.",
    "step_seconds": "Seconds a step took, by the size that its tokens fit in.",
    "queue_seconds": "Seconds from a request's submission until it was first scheduled.",
    "ttft_seconds": "Seconds from a request's submission to the first token of a sequence.",
    "gap_seconds": "Seconds between a token of a sequence and the next.",
    "request_seconds": "Seconds from a request's submission until its last sequence had ended.",
}

# The engine's gauges that are also given for each replica.
OF_REPLICAS = {
    "requests_running": "Requests of the replica with a sequence that has a slot.",
    "requests_waiting": "Requests of the replica without such a sequence.",
    "kv_blocks": "Blocks of the replica's KV cache.",
    "kv_blocks_held": "Blocks that the replica's sequences hold.",
}


class ServerMetrics:
    """The server's own counters, and the last known counters of the engine. It belongs to one event loop.

    ``is_up()`` returns whether requests are accepted.
    """

    def __init__(self, is_up: Callable[[], bool]):
        self.registry = CollectorRegistry(auto_describe=False)
        # The counters of all ended engines.
        self._ended: Metrics | None = None
        # The last counters of each running engine.
        self._latest: dict[str, Metrics] = {}
        # The last counters of those that may still run, and are not heard now.
        self._away: dict[str, Metrics] = {}
        # How often engines were started again or lost, up to the last look.
        self.num_restarts = 0
        self.registry.register(_EngineCollector(self))
        ProcessCollector(namespace="fastgen_server", registry=self.registry)
        Gauge("fastgen_up", "Whether requests are taken.", registry=self.registry).set_function(lambda: float(is_up()))
        self.connections = Gauge("fastgen_connections", "HTTP connections that are open.", registry=self.registry)
        self.grpc_connections = Gauge(
            "fastgen_grpc_connections", "Connections to the gRPC port that are open.", registry=self.registry
        )
        self._refused = self._counter("refused", "Requests not taken, by why.", "reason")
        self._log_lines_dropped = self._counter("log_lines_dropped", "Lines of the log that could not be written.")
        self._http_requests = self._counter("http_requests", "HTTP requests.", "route", "method", "status")
        self._answers = self._counter("answers", "Answers that were given whole; one a sequence.")
        self._good_answers = self._counter("good_answers", "Those that came at this rate; see goodput.", "tokens_per_s")
        self._first_token = OwnHistogram(
            "fastgen_server_ttft_seconds",
            "Seconds from a request's arrival at the server to the first token of a sequence.",
            buckets=REQUEST_BOUNDS_S,
            registry=self.registry,
        )
        for rate in RATES:  # starts at 0, so that the first event shows as a change
            self._good_answers.labels(str(rate))
        for reason in get_args(Refusal):
            self._refused.labels(reason)

    def observe(self, metrics: Metrics, replica: str = "") -> None:
        """Takes the counters of a running engine."""
        self._away.pop(replica, None)
        self._latest[replica] = metrics

    def engine_away(self, replica: str = "") -> None:
        """Keeps the counters of an engine that is not heard now. If it is heard again, it continues to count."""
        if (last := self._latest.pop(replica, None)) is not None:
            self._away[replica] = counters(last)

    def engine_ended(self, replica: str = "") -> None:
        """Keeps the counters of an engine that has ended; the next one counts from zero."""
        self.engine_away(replica)
        if (last := self._away.pop(replica, None)) is not None:
            self._ended = last if self._ended is None else total(self._ended, last)

    def engine(self) -> Metrics | None:
        """Returns the counters of all engines so far, and the sums of the running ones' gauges (zero if none
        runs).
        """
        ended = [] if self._ended is None else [self._ended]
        known = [*ended, *self._away.values(), *self._latest.values()]
        return reduce(total, known) if known else None

    @property
    def replicas(self) -> dict[str, Metrics]:
        """Returns the last counters of each replica; empty on a server without replicas."""
        return {replica: metrics for replica, metrics in self._latest.items() if replica}

    def answered(self, num_prompt_tokens: int, ttft_s: float, gaps_s: Sequence[float]) -> None:
        """Counts a complete answer of a sequence: its first token after ``ttft_s`` seconds, the others with
        these gaps.
        """
        self._answers.inc()
        self._first_token.observe(ttft_s)
        for rate in good_rates(num_prompt_tokens, ttft_s, gaps_s):
            self._good_answers.labels(str(rate)).inc()

    def refused(self, reason: Refusal) -> None:
        """Counts a refused request."""
        self._refused.labels(reason).inc()

    def log_line_dropped(self) -> None:
        """Counts a line of the log that was not written. May be called in any thread."""
        self._log_lines_dropped.inc()

    def http_request(self, route: str, method: str, status: int) -> None:
        """Counts an answered HTTP request. ``route`` is a path of the application, or ``other``."""
        self._http_requests.labels(route, method, str(status)).inc()

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self.registry)


class _EngineCollector:
    """The engine's metrics as Prometheus families, one for each field of :class:`Metrics`."""

    def __init__(self, server: ServerMetrics):
        self._server = server

    def collect(self) -> Iterable[Metric]:
        restarts = "Times the engine was started again, or a replica was lost."
        yield CounterMetricFamily(f"{PREFIX}engine_restarts", restarts, self._server.num_restarts)
        metrics = self._server.engine()
        if metrics is not None:
            for field in fields(metrics):
                yield _family(field.name, getattr(metrics, field.name))
        for name, about in OF_REPLICAS.items():
            if replicas := self._server.replicas:
                family = GaugeMetricFamily(f"{PREFIX}replica_{name}", about, labels=["replica"])
                for replica, its in replicas.items():
                    family.add_metric([replica], getattr(its, name))
                yield family


def _family(name: str, value: Any) -> Metric:
    label = LABELS.get(name)
    labels = [] if label is None else [label]
    parts = {(): value} if label is None else {(str(key),): part for key, part in value.items()}
    family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if name.endswith("_seconds"):
        family = HistogramMetricFamily(PREFIX + name, HELP[name], labels=labels)
        for key, part in parts.items():
            bounds = [*map(str, part.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(part.counts), strict=True))
            family.add_metric(key, buckets, part.sum)
        return family
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(PREFIX + name, HELP[name], labels=labels)
    for key, part in parts.items():
        family.add_metric(key, part)
    return family
