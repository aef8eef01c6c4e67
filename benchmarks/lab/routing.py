"""Compares routers in front of simulated replicas: the product's own, and Ray Serve's prefix router.

``python -m benchmarks.lab.routing [COMPARISON …] --output FILE`` runs each load with every router, in virtual time and
with the same seeds. A comparison that ``FILE`` has already is kept unless it is named. With ``--routers`` only these
are run again, and the figures of the others are kept: only their own time differs from run to run. ``--tables`` prints
the tables of docs/routing.md from ``FILE``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from benchmarks.lab.ray_prefix import RayPrefix
from benchmarks.lab.routing_load import conversations, prefixes
from benchmarks.new_file import new_file
from fastgen.lab.machine import machine_facts
from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.metrics.means import mean_interval
from fastgen.lab.paper.servers import Server
from fastgen.lab.simulation import ServerSettings, Simulation
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.runtime.routing import RoutedRequest, Router, make_router

SERVER = Server(
    model="llama-3.1-70b", device="A100-80", tensor_parallel=4, token_budget=768, options={"prefix_caching": True}
)
GOOD = SLO(ttft_ms=1000, tpot_ms=50)
PROMPT = SLO(ttft_ms=200, tpot_ms=50)
RAY = {"ray": "Ray's prefix router", "ray_5": "Ray's, `imbalanced_threshold=5`"}
ALL = ("random", "least_tokens", "ray", "ray_5", "prefix")


@dataclass(frozen=True)
class Comparison:
    """One load on some replicas, with several routers and seeds. ``rate`` is that of each replica."""

    title: str
    load: Callable[[float, int, float, int], list[PlannedRequest]]
    rate: float
    num_replicas: int
    duration_s: float
    # Only requests that are sent after this count.
    warm_up_s: float
    routers: Sequence[str]
    seeds: Sequence[int]


def shared_conversations(rate: float, num_replicas: int, duration_s: float, seed: int) -> list[PlannedRequest]:
    return conversations(rate, num_replicas, duration_s, seed, num_shared=1024)


_SEEDS = (1, 2, 3, 4)
COMPARISONS = {
    "conversations": Comparison(
        "Conversations of 10 turns × (150 + 350) tokens, one begins each second and replica",
        conversations, 1.0, 4, 120.0, 70.0, ("random", "least_tokens", "ray", "prefix", "prefix, no sessions"), _SEEDS,
    ),
    "more_conversations": Comparison(
        "The same conversations, 1.3 begin each second and replica, about as many as can be answered",
        conversations, 1.3, 4, 120.0, 70.0, ("ray", "prefix"), (*_SEEDS, 5, 6, 7, 8),
    ),
    "fewer_conversations": Comparison(
        "The same conversations, 0.3 begin each second and replica",
        conversations, 0.3, 4, 120.0, 70.0, ("random", "least_tokens", "ray", "prefix"), _SEEDS,
    ),
    "system_prompt": Comparison(
        "Conversations that all begin with the same 1,024 tokens, 0.6 begin each second and replica",
        shared_conversations, 0.6, 4, 120.0, 70.0, ALL, _SEEDS[:3],
    ),
    "prefixes": Comparison(
        "Prompts of 2,048 + 128 tokens and answers of 64; 64 prefixes, some far more frequent; 16 requests each second "
        "and replica",
        prefixes, 16.0, 8, 60.0, 20.0, ALL, _SEEDS,
    ),
    "large": Comparison(
        "256 replicas: conversations of turns of 150 + 350 tokens, one begins each second and replica",
        conversations, 1.0, 256, 36.0, 14.0, ("ray", "prefix"), _SEEDS[:1],
    ),
    "large_prefixes": Comparison(
        "256 replicas: prompts of 2,048 + 128 tokens and answers of 64; 2,048 prefixes, some far more frequent; 16 "
        "requests each second and replica",
        prefixes, 16.0, 256, 8.0, 3.0, ("ray", "prefix"), _SEEDS[:1],
    ),
    "later_prefixes": Comparison(
        "64 replicas, of a longer run: the same prompts, 512 prefixes, some far more frequent; 16 requests each second "
        "and replica",
        prefixes, 16.0, 64, 24.0, 16.0, ("ray", "prefix"), _SEEDS[:1],
    ),
}  # fmt: skip


class NoSessions:
    """Hides from a router which requests belong together."""

    def __init__(self, router: Router):
        self._router = router
        self._seen: dict[RoutedRequest, RoutedRequest] = {}

    def rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        return self._router.rank(self._seen.setdefault(request, replace(request, session=None)), replicas)

    def sent(self, request: RoutedRequest, replica: str) -> None:
        self._router.sent(self._seen[request], replica)

    def ended(self, request: RoutedRequest, replica: str) -> None:
        self._router.ended(self._seen.pop(request), replica)

    def forget(self, replica: str) -> None:
        self._router.forget(replica)

    def outstanding(self, replica: str) -> int:
        return self._router.outstanding(replica)


class Observed:
    """Measures what a router takes, in processor time, and what it does."""

    def __init__(self, router: Router, warm_up: int):
        self._router, self._warm_up = router, warm_up
        self.took_s: list[float] = []
        # Tokens that each replica was sent, after the first requests.
        self.tokens: Counter[str] = Counter()

    def rank(self, request: RoutedRequest, replicas: Sequence[str]) -> list[str]:
        began_s = time.process_time()
        ranked = self._router.rank(request, replicas)
        self.took_s.append(time.process_time() - began_s)
        return ranked

    def sent(self, request: RoutedRequest, replica: str) -> None:
        began_s = time.process_time()
        self._router.sent(request, replica)
        self.took_s[-1] += time.process_time() - began_s
        if len(self.took_s) > self._warm_up:
            self.tokens[replica] += request.num_new_tokens

    def ended(self, request: RoutedRequest, replica: str) -> None:
        self._router.ended(request, replica)

    def forget(self, replica: str) -> None:
        self._router.forget(replica)

    def outstanding(self, replica: str) -> int:
        return self._router.outstanding(replica)


def router(name: str, settings: ServerSettings, seed: int) -> Router:
    if name == "ray":
        return RayPrefix(seed=seed)
    if name == "ray_5":
        return RayPrefix(imbalanced_threshold=5, seed=seed)
    kind, _, sessions = name.partition(", ")
    made = make_router(kind, block_size=settings.block_size, num_blocks=settings.num_blocks, seed=seed)
    return NoSessions(made) if sessions else made


def measured(comparison: Comparison, name: str, seed: int) -> dict[str, float]:
    """Returns the figures of one run."""
    settings, cost = SERVER.build()
    each, count, begin_s, end_s = comparison, comparison.num_replicas, comparison.warm_up_s, comparison.duration_s
    requests = each.load(each.rate, count, end_s, seed)
    observed = Observed(router(name, settings, seed), len(requests) // 3)
    run = Simulation(requests, settings, cost, num_replicas=count, router=observed, seed=seed).run()
    records = [record for record in run.records if begin_s <= record.sent_s < end_s]
    seconds = end_s - begin_s
    ttfts_s, took_s = sorted(record.ttft_s or 0.0 for record in records), sorted(observed.took_s)
    return {
        "requests": len(records),
        "sent_per_s": len(records) / seconds,
        "goodput": sum(map(GOOD.is_good, records)) / seconds,
        "prompt_goodput": sum(map(PROMPT.is_good, records)) / seconds,
        "cached": sum(each.num_cached_tokens or 0 for each in records)
        / sum(each.num_prompt_tokens for each in records),
        "p50_ttft_s": ttfts_s[len(records) // 2],
        "p99_ttft_s": ttfts_s[len(records) * 99 // 100],
        "imbalance": max(observed.tokens.values()) * count / sum(observed.tokens.values()),
        "router_p50_us": 1e6 * took_s[len(took_s) // 2],
        "router_p99_us": 1e6 * took_s[len(took_s) * 99 // 100],
    }


def compare(
    comparison: Comparison, only: Sequence[str] = (), before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the figures of every router and seed. With ``only`` some names of routers, the figures of the others are
    those of the result ``before``.
    """
    machine = machine_facts()  # with the build that begins, whatever is committed meanwhile
    kept = {} if before is None or not only else before["routers"]
    found: dict[str, list[dict[str, float]]] = {
        name: kept[name] if name in kept and name not in only else [] for name in comparison.routers
    }
    own = [name for name in comparison.routers if not found[name]]
    for seed in comparison.seeds:
        for name in own:
            began_s = time.monotonic()
            figures = {key: float(f"{value:.5g}") for key, value in measured(comparison, name, seed).items()}
            found[name].append(figures)
            print(f"  {name}, seed {seed}, {time.monotonic() - began_s:.0f} s: {figures}", flush=True)
    facts = {key: value for key, value in asdict(comparison).items() if key not in ("load", "routers")}
    facts |= {"routers": found, "date": datetime.now(UTC).date().isoformat(), "machine": machine}
    if before is not None and len(own) < len(found):
        others = [name for name in found if name not in own]
        facts["kept"] = {"routers": others, "date": before["date"], "machine": before["machine"]}
    return facts


def tables(results: Mapping[str, Any]) -> str:
    """Returns a table for each comparison: means over the seeds, and paired differences of goodput, with intervals if
    there are several seeds.
    """
    parts = []
    for found in results.values():
        lines = [
            "| router | good/s: TTFT ≤ 1 s | `prefix` more by | good/s: TTFT ≤ 0.2 s | `prefix` more by | sent/s | "
            "prompt tokens cached | TTFT P50 / P99 (s) | busiest replica | router P50 / P99 (µs) |",
            "|" + " --- |" * 10,
        ]
        for name, runs in found["routers"].items():
            means = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
            lines.append(
                f"| {RAY.get(name, f'`{name}`')} | {means['goodput']:.1f} | {_gain(found, name, 'goodput')} | "
                f"{means['prompt_goodput']:.1f} | {_gain(found, name, 'prompt_goodput')} | {means['sent_per_s']:.1f} | "
                f"{means['cached']:.1%} | {means['p50_ttft_s']:.2f} / {means['p99_ttft_s']:.2f} | "
                f"{means['imbalance']:.2f} × the mean | "
                f"{means['router_p50_us']:.0f} / {means['router_p99_us']:.0f} |"
            )
        facts = (
            f"{found['num_replicas']} replicas, {found['duration_s']:.0f} s of which the first "
            f"{found['warm_up_s']:.0f} do not count, seeds {', '.join(map(str, found['seeds']))}."
        )
        parts.append(f"**{found['title']}.** {facts}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _gain(found: Mapping[str, Any], name: str, figure: str) -> str:
    """Returns by how much ``prefix`` is above a router, the mean of the seeds' differences and its 95 % interval."""
    if name == "prefix":
        return ""
    pairs = zip(found["routers"]["prefix"], found["routers"][name], strict=True)
    gains = [own[figure] - other[figure] for own, other in pairs]
    if len(gains) == 1:
        return f"{gains[0]:.1f}"
    gain, low, high = mean_interval(gains)
    return f"{gain:.1f} [{low:.1f}, {high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", nargs="*", metavar="COMPARISON", help=f"of {', '.join(COMPARISONS)}; or all")
    parser.add_argument("--routers", nargs="+", default=(), metavar="ROUTER", help="run only these again; or all")
    parser.add_argument("--output", type=new_file, required=True)
    parser.add_argument("--tables", action="store_true", help="print the tables of the file, and run nothing")
    options = parser.parse_args()
    content = json.loads(options.output.read_text()) if options.output.exists() else {}
    if options.tables:
        print(tables(content["results"]), end="")
        return
    content |= {
        "good": [GOOD.as_json(), PROMPT.as_json()],
        "server": SERVER.build()[0].facts() | {"model": SERVER.model},
    }
    content.setdefault("results", {})
    for name in options.comparisons or [each for each in COMPARISONS if each not in content["results"]]:
        print(name, flush=True)
        content["results"][name] = compare(COMPARISONS[name], options.routers, content["results"].get(name))
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
