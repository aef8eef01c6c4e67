"""The three insights of the FastGen paper's section 3.1: measured on this machine, and computed for 4 × A100."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastgen.lab.paper.reproduction import Reproduction, Result, Setting, rounded
from fastgen.lab.paper.servers import Server
from fastgen.lab.paper.tables import table, three
from fastgen.lab.report.plots import panel_plot
from fastgen.lab.report.points import Curve, Measured, Point
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.step_cost.work import StepWork

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fastgen.runtime.engine import Engine

# Tokens of a forward pass, and sequences that share them.
_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS_OF_A100: Final = (*_TOKENS, 768, 1024, 1536, 2048)
_SEQUENCES: Final = (1, 4, 16)
_ROUNDS: Final = 7
# A pool of tokens in two forward passes: the smaller of the two, as a share of the pool.
_SHARES: Final = (1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 32)
_POOLS: Final = {"here": 512, "a100": 1024}
# Seconds of a forward pass of so many tokens in so many sequences.
_Seconds = Callable[[int, int], float]


def run(setting: Setting) -> dict[str, Any]:
    """Returns the times of forward passes here and on the simulated device.

    :raises InvalidArgumentError: without a model to measure.
    """
    model = setting.measured_model()
    tokens, rounds, pool = ((1, 8, 32), 2, 32) if setting.small else (_TOKENS, _ROUNDS, _POOLS["here"])
    with _Machine(model, max(tokens)) as machine:
        here = _measured(machine.seconds, tokens, pool, rounds)
    server = Server(model="llama-2-70b", device="A100-80", tensor_parallel=4, token_budget=max(_TOKENS_OF_A100))
    _, cost = server.build()

    def simulated(num_tokens: int, num_sequences: int) -> float:
        work = StepWork(0, 0, 0)
        for length in _lengths(num_tokens, num_sequences):
            work = work.with_chunk(0, length, 1)
        return cost.seconds(work)

    a100 = _measured(simulated, _TOKENS_OF_A100, _POOLS["a100"], 1)
    return {"model": str(model).rstrip("/").rpartition("/")[2], "rounds": rounds, "here": here, "a100": a100}


class _Machine:
    """Runs forward passes on an engine in this process."""

    def __init__(self, model: str, most_tokens: int):
        import fastgen

        llm = fastgen.load(
            model, policy="prefill_first", token_budget=most_tokens, max_num_seqs=max(_SEQUENCES), prefix_caching=False
        )
        self._engine: Engine = llm.release_engine()
        self._draw = random.Random(0)

    def __enter__(self) -> _Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.cancel_all()

    def seconds(self, num_tokens: int, num_sequences: int) -> float:
        """Returns the time of one step that computes prompts and gives each a token."""
        engine = self._engine
        for length in _lengths(num_tokens, num_sequences):
            prompt_ids = [self._draw.randrange(10, engine.vocab_size) for _ in range(length)]
            engine.submit(prompt_ids, SamplingParams(max_new_tokens=1, ignore_eos=True))
        begin_s = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - begin_s


def _lengths(num_tokens: int, num_sequences: int) -> Iterator[int]:
    """Yields the lengths of prompts that share ``num_tokens`` as evenly as possible."""
    for place in range(num_sequences):
        yield (num_tokens + place) // num_sequences


def _measured(seconds: _Seconds, tokens: Sequence[int], pool: int, rounds: int) -> dict[str, Any]:
    """Measures all cells once in each round, after a round that does not count."""
    cells = [(count, sequences) for count in tokens for sequences in _SEQUENCES if sequences <= count]
    splits = [(max(1, round(pool * share)), pool - max(1, round(pool * share))) for share in _SHARES]
    times: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    split_times: dict[tuple[int, int], list[float]] = {split: [] for split in splits}
    for number in range(rounds + (rounds > 1)):
        for cell in cells:
            times[cell].append(seconds(*cell))
        for smaller, larger in splits:
            split_times[smaller, larger].append(seconds(smaller, 1) + seconds(larger, 1))
        if number == 0 and rounds > 1:
            for found in (*times.values(), *split_times.values()):
                found.clear()
    return {
        "forwards": [{"tokens": count, "sequences": each, **_spread(times[count, each])} for count, each in cells],
        "pool": pool,
        "splits": [{"passes": list(split), **_spread(split_times[split])} for split in splits],
    }


def _spread(times_s: Sequence[float]) -> dict[str, Any]:
    low, high = np.percentile(times_s, (25, 75))
    return {"seconds": rounded(median(times_s)), "quartiles": [rounded(float(low)), rounded(float(high))]}


def section(result: Result) -> str:
    """Returns what was found of each insight, here and for the A100s."""
    names = {"here": f"here ({result['model']})", "a100": "4 × A100 (Llama-2-70B, roofline)"}
    firsts = [_first_insight(names[place], result[place]) for place in names]
    seconds = [_second_insight(names[place], result[place]) for place in names]
    thirds = [_third_insight(names[place], result[place]) for place in names]
    return "\n\n".join(
        [
            "Forward passes of exact composition: prompts that share the tokens evenly, each given one token. Here: "
            f"medians of {result['rounds']} rounds in which every cell is measured once, scheduling and sampling "
            "included. Bars in the pictures reach from P25 to P75: wide ones mean that other programs used the "
            "machine.",
            "**1. The time of a forward pass follows its tokens, not its sequences.**",
            table(("", "4 times the tokens cost", "16 sequences instead of 1, same tokens"), firsts),
            "The first column is from 64 to 256 tokens in one sequence, the second is for 256 tokens.",
            "**2. Tokens a second rise with the tokens of a forward pass, then saturate.**",
            table(
                ("", "1 token", "highest", "90 % of the highest from", "steps of the curve that are concave"), seconds
            ),
            "**3. A pool of tokens is best split evenly over two forward passes.**",
            table(("", "pool", *(f"{share:.0%} and {1 - share:.0%}" for share in _SHARES)), thirds),
            "Time of the two passes together, as a multiple of the even split. The paper derives this insight from the "
            "concave curve of throughput. That is not quite enough: the time of a pool is the sum of the times of its "
            "passes, so an even split is best where *time* is convex in tokens. Where time is a line, as it nearly is "
            "beyond saturation, every split costs the same, though throughput is concave there too. The gain comes "
            "from the knee: a pass with few tokens reads all weights and computes little.",
        ]
    )


def _first_insight(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    times = {(each["tokens"], each["sequences"]): each["seconds"] for each in found["forwards"]}
    tokens = sorted({count for count, _ in times})
    large = 256 if 256 in tokens else tokens[-1]
    by_tokens = times[large, 1] / times[min(tokens, key=lambda each: abs(each - large / 4)), 1]
    by_sequences = times[large, max(_SEQUENCES)] / times[large, 1]
    return name, f"{by_tokens:.2f} times", f"{by_sequences:.2f} times"


def _second_insight(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    rates = {each["tokens"]: each["tokens"] / each["seconds"] for each in found["forwards"] if each["sequences"] == 1}
    highest = max(rates.values())
    enough = next(tokens for tokens, rate in rates.items() if rate >= 0.9 * highest)
    slopes = [(rates[after] - rates[before]) / (after - before) for before, after in pairwise(rates)]
    concave = sum(later <= earlier for earlier, later in pairwise(slopes))
    return (
        name,
        f"{three(rates[min(rates)])} tokens/s",
        f"{three(highest)} tokens/s",
        f"{enough:,} tokens",
        f"{concave} of {len(slopes) - 1}",
    )


def _third_insight(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    even_s = found["splits"][0]["seconds"]
    return name, f"{found['pool']:,} tokens", *(f"{each['seconds'] / even_s:.2f}" for each in found["splits"])


def pictures(result: Result) -> dict[str, Figure]:
    """Returns latency against tokens for each number of sequences, and throughput against tokens."""
    titles = {"here": f"measured here ({result['model']})", "a100": "Llama-2-70B on 4 × A100 (roofline)"}
    latency = {titles[place]: _latency_curves(result[place]) for place in titles}
    throughput = {titles[place]: [_throughput_curve(result[place])] for place in titles}
    options: dict[str, Any] = {"share_x": False, "share_y": False}
    return {
        "insights_latency": panel_plot(latency, x="tokens in the forward pass", y="time (ms)", **options),
        "insights_throughput": panel_plot(throughput, x="tokens in the forward pass", y="tokens/s", **options),
    }


def _latency_curves(found: Mapping[str, Any]) -> list[Curve]:
    curves = []
    for sequences in _SEQUENCES:
        points = [
            Point(Measured(each["tokens"]), Measured(each["seconds"], *each["quartiles"]).scaled(1e3))
            for each in found["forwards"]
            if each["sequences"] == sequences
        ]
        curves.append(Curve(f"{sequences} sequence{'s' if sequences > 1 else ''}", tuple(points)))
    return curves


def _throughput_curve(found: Mapping[str, Any]) -> Curve:
    points = []
    for each in found["forwards"]:
        if each["sequences"] == 1:
            low, high = (each["tokens"] / end for end in reversed(each["quartiles"]))
            points.append(Point(Measured(each["tokens"]), Measured(each["tokens"] / each["seconds"], low, high)))
    return Curve("one sequence", tuple(points))


INSIGHTS: Final = Reproduction(
    "insights", "Three insights: measured here, and simulated for A100 (section 3.1)", run, section, pictures
)
