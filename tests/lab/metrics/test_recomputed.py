"""A run's file read by pandas: goodput, percentiles and intervals recomputed without the code under test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.metrics.summary import Summary, summarize
from fastgen.lab.records import write_run
from tests.lab.runs import closed_loop

LIMITS_MS = {"ttft": 1200.0, "tpot": 300.0, "itl": 1000.0}
RATES = (2, 4, 6)
PERCENTS = (50, 90, 95, 99)
# Draws of a bootstrap, and how far an end of an interval may lie from ours by chance, as a share of the interval. The
# standard deviation is 3 % for a mean, and more for a percentile, which moves from one sample to the next.
NUM_DRAWS = 1000
TOLERANCE = 0.15


class Recomputed:
    """The frames of a run's file: its requests, and the gaps between their tokens."""

    def __init__(self, file: Path):
        lines = pd.read_json(file, lines=True)
        self.header, self.sent = lines.iloc[0], lines.iloc[1:].set_index("request")
        self.answered = self.sent[self.sent["error"].isna()].copy()
        times = self.answered["token_times_s"].explode().astype(float)
        by_request = times.groupby(level=0)
        self.gaps_ms = 1e3 * by_request.diff().dropna()
        self.answered["tokens"] = by_request.size()
        self.answered["ttft"] = 1e3 * (by_request.first() - self.answered["sent_s"])
        self.answered["e2el"] = 1e3 * (self.answered["ended_s"] - self.answered["sent_s"])
        self.answered["tpot"] = self.gaps_ms.groupby(level=0).mean()
        worst = self.gaps_ms.groupby(level=0).max().reindex(self.answered.index)
        self.answered["good"] = (
            (self.answered["ttft"] <= LIMITS_MS["ttft"])
            & ~(self.answered["tpot"] > LIMITS_MS["tpot"])
            & ~(worst > LIMITS_MS["itl"])
        )
        means_ms = self.gaps_ms.groupby(level=0).transform(lambda each: each.ewm(span=16, adjust=True).mean())
        slowest = means_ms.groupby(level=0).max().reindex(self.answered.index)
        for rate in RATES:
            in_time = self.answered["ttft"] <= 1e3 * self.answered["num_prompt_tokens"] / 512
            self.answered[f"good_{rate}"] = in_time & ~(slowest >= 1e3 / rate)

    def latencies(self) -> dict[str, pd.Series]:
        return {name: self.answered[name].dropna() for name in ("ttft", "tpot", "e2el")} | {"itl": self.gaps_ms}


def summarized(file: Path, num_requests: int) -> tuple[Recomputed, Summary]:
    run = closed_loop(num_requests, 16, failing=50)
    write_run(run, file)
    return Recomputed(file), summarize(run, slo=SLO(ttft_ms=1200.0, tpot_ms=300.0, itl_ms=1000.0))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recomputed, Summary]:
    return summarized(tmp_path_factory.mktemp("run") / "run.jsonl", 700)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recomputed, Summary]:
    """Returns a run that is quick to draw from."""
    return summarized(tmp_path_factory.mktemp("run") / "run.jsonl", 200)


def test_goodput_is_that_of_pandas(both: tuple[Recomputed, Summary]) -> None:
    frames, summary = both
    answered, wall_s = frames.answered, frames.answered["ended_s"].max() - frames.answered["sent_s"].min()
    assert summary["request_goodput"].value == pytest.approx(answered["good"].sum() / frames.header["duration_s"])
    assert summary["good_share"].value == pytest.approx(answered["good"].sum() / len(frames.sent))
    for rate in RATES:
        good = answered[f"good_{rate}"]
        assert summary[f"effective_throughput_{rate}"].value == pytest.approx(good.sum() / wall_s)
        assert summary[f"effective_share_{rate}"].value == pytest.approx(good.mean())
    assert 0.1 < answered["good"].mean() < 0.9, "the limits decide"
    assert 0.1 < answered["good_6"].mean() < answered["good_2"].mean() < 0.95, "the moving average decides"


def test_percentiles_are_those_of_pandas(both: tuple[Recomputed, Summary]) -> None:
    frames, summary = both
    for name, values in frames.latencies().items():
        assert summary[f"mean_{name}_ms"].value == pytest.approx(values.mean())
        assert summary[f"std_{name}_ms"].value == pytest.approx(values.std(ddof=0))
        assert summary[f"median_{name}_ms"].value == pytest.approx(values.median())
        for percent in PERCENTS:
            assert summary[f"p{percent}_{name}_ms"].value == pytest.approx(values.quantile(percent / 100))
    times = frames.answered.sort_values("sent_s").iloc[1:-1]
    parts = [
        1e3 * pd.Series([sent_s, *token_times_s]).diff().iloc[2:-1]
        for sent_s, token_times_s in zip(times["sent_s"], times["token_times_s"], strict=True)
    ]
    for percent in (50, 90, 95):
        assert summary[f"paper_p{percent}_gap_ms"].value == pytest.approx(pd.concat(parts).quantile(percent / 100))


def close(found: tuple[float, float] | None, draws: pd.Series) -> bool:
    """Returns whether the ends of an interval are those of the middle 95 % of ``draws``, but for chance."""
    assert found is not None
    low, high = draws.quantile(0.025), draws.quantile(0.975)
    return max(abs(found[0] - low), abs(found[1] - high)) <= TOLERANCE * (high - low)


@pytest.mark.slow  # rates are drawn in the same way
def test_intervals_of_latencies_are_those_of_a_bootstrap_of_requests(small: tuple[Recomputed, Summary]) -> None:
    frames, summary = small
    names, levels = ["ttft", "tpot", "e2el"], [0.5, 0.9, 0.95]
    means: dict[str, list[float]] = {name: [] for name in (*names, "itl")}
    percentiles: dict[str, list[pd.Series]] = {name: [] for name in (*names, "itl")}
    for seed in range(NUM_DRAWS):
        drawn = frames.answered[names].sample(frac=1, replace=True, random_state=seed)
        times_drawn = drawn.index.value_counts()
        gaps = frames.gaps_ms.repeat(frames.gaps_ms.index.map(times_drawn).fillna(0).astype(int))
        for name in means:
            values = gaps if name == "itl" else drawn[name]
            means[name].append(values.mean())
            percentiles[name].append(values.quantile(levels))
    for name in means:
        assert close(summary[f"mean_{name}_ms"].interval, pd.Series(means[name])), name
        for level in levels:
            found = pd.Series([each[level] for each in percentiles[name]])
            assert close(summary[f"p{100 * level:.0f}_{name}_ms"].interval, found), (name, level)


def test_intervals_of_rates_are_those_of_a_bootstrap_of_blocks(small: tuple[Recomputed, Summary]) -> None:
    frames, summary = small
    ended = frames.answered.sort_values("ended_s")
    waits_s = ended["ended_s"].diff().fillna(ended["ended_s"].iloc[0])
    block = max(int(len(ended) ** 0.5), int(summary["max_concurrent_requests"].value or 0))
    amounts = {
        "request_throughput": ended["good"] | True,
        "output_throughput": ended["tokens"],
        "request_goodput": ended["good"],
    }
    for name, amount in amounts.items():
        draws = []
        for seed in range(NUM_DRAWS):
            starts = pd.Series(range(len(ended))).sample(-(-len(ended) // block), replace=True, random_state=seed)
            places = np.concatenate([(start + np.arange(block)) % len(ended) for start in starts])
            draws.append(amount.iloc[places].sum() / waits_s.iloc[places].sum())
        assert close(summary[name].interval, pd.Series(draws)), name


def test_intervals_of_shares_solve_wilsons_equation(both: tuple[Recomputed, Summary]) -> None:
    frames, summary = both
    shares = {
        "completed_share": frames.sent["error"].isna(),
        "good_share": frames.answered["good"].reindex(frames.sent.index, fill_value=False),
        **{f"effective_share_{rate}": frames.answered[f"good_{rate}"] for rate in RATES},
    }
    for name, kept in shares.items():
        # The shares p from which the one found is 1.96 standard deviations away: (share − p)² n = z² p (1 − p).
        share, total, z2 = kept.mean(), len(kept), 1.959963984540054**2
        ends = np.sort(np.roots([total + z2, -2 * total * share - z2, total * share**2]))
        assert summary[name].interval == pytest.approx(tuple(ends)), name
