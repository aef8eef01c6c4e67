"""The pages of the lab say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from fastgen.lab.metrics.figures import LATENCIES, STATISTICS, UNITS
from fastgen.lab.metrics.goodput import SLO, parse_slo
from fastgen.lab.workloads.arrivals import ARRIVALS
from fastgen.lab.workloads.named import described
from fastgen.lab.workloads.registry import described_workloads, make_workload

DOCS = Path(__file__).resolve().parents[2] / "docs"


def shown(text: str) -> set[str]:
    """Returns the words in code type; a word that begins with ``_`` continues the name before it: `a_2`, `_4`."""
    found: set[str] = set()
    last = ""
    for word in re.findall(r"`([^`\n]+)`", text):
        if word.startswith("_") and last:
            found.add(last.rpartition("_")[0] + word)
        else:
            found.add(word)
            last = word
    return found


def test_the_page_of_metrics_defines_every_figure() -> None:
    page = (DOCS / "lab-metrics.md").read_text()
    words = shown(page)
    composed = {
        f"{statistic}_{latency}_ms"
        for latency in LATENCIES
        for statistic in STATISTICS
        if {f"{statistic}_", f"{latency}_ms"} <= words
    }
    assert set(UNITS) - words - composed == set()
    assert parse_slo(["paper:4"]) == SLO(paper_tokens_per_s=4)
    assert {"ttft:200", "e2el:5000", "tpot:50", "itl:100", "paper:4"} <= words


def test_the_page_of_workloads_lists_them_as_the_help_does() -> None:
    page = (DOCS / "lab-workloads.md").read_text()
    blocks = re.findall(r"^```text\n(.*?)\n^```", page, re.M | re.S)
    assert blocks == [described_workloads(), described(ARRIVALS)]
    assert make_workload("paper:prompt=1200,answer=128,n=512").facts()["n"] == 512
