"""Results of other tools, of small files made for these tests and of our own runs written as those tools write them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import RecordingError
from fastgen.lab.imports.guidellm import read_guidellm
from fastgen.lab.imports.results import read_results
from fastgen.lab.imports.vllm_bench import read_vllm_bench
from fastgen.lab.metrics.summary import Summary, summarize
from fastgen.lab.records import RequestRecord, Run
from tests.lab.runs import closed_loop

DATA = Path(__file__).parents[1] / "data"


def gaps(record: RequestRecord) -> list[float]:
    return [after - before for before, after in pairwise(record.token_times_s)]


def as_vllm_bench(run: Run, *, detailed: bool) -> dict[str, Any]:
    """Returns a run of ours as ``vllm bench serve`` writes it; its answers end with their last token."""
    found = {name: value for name, value in summarize(run).as_json().items() if value is not None}
    found = {name: value for name, value in found.items() if not name.endswith("_interval")}
    if detailed:
        answered = [record.error is None for record in run.records]
        found |= {
            "start_times": [record.sent_s for record in run.records],
            "ttfts": [record.ttft_s if ok else 0.0 for record, ok in zip(run.records, answered, strict=True)],
            "itls": [gaps(record) if ok else [] for record, ok in zip(run.records, answered, strict=True)],
            "input_lens": [record.num_prompt_tokens for record in run.records],
            "output_lens": [
                record.num_generated if ok else 0 for record, ok in zip(run.records, answered, strict=True)
            ],
            "errors": ["" if ok else "it broke" for ok in answered],
        }
    return found


LATENCIES = [
    f"{statistic}_{name}_ms" for statistic in ("mean", "p50", "p95") for name in ("ttft", "tpot", "itl", "e2el")
]


def test_detailed_results_of_vllm_bench_have_the_figures_and_the_intervals_of_the_same_run(tmp_path: Path) -> None:
    run = closed_loop(300, 8, failing=30, ends_late=False)
    (tmp_path / "result.json").write_text(json.dumps(as_vllm_bench(run, detailed=True)))
    ours = summarize(run)
    [theirs] = read_vllm_bench(tmp_path / "result.json")
    for name in [*LATENCIES, "request_throughput", "output_throughput", "total_token_throughput", "completed_share"]:
        assert theirs[name].value == ours[name].value, name
        assert theirs[name].interval == pytest.approx(ours[name].interval, rel=1e-6), name


def test_results_without_details_have_no_intervals_but_of_shares() -> None:
    [summary] = read_vllm_bench(DATA / "vllm_bench.json")
    assert summary.source == "vllm bench"
    assert summary["completed"].value == 11
    assert summary["failed"].value == 1
    assert summary["mean_ttft_ms"].value == pytest.approx(119.6545, abs=1e-4)
    assert summary["median_ttft_ms"].value is not None
    assert summary["p99_ttft_ms"].value is None, "11 answers have no P99"
    assert summary["request_goodput"].value is None
    assert summary["effective_throughput_4"].value is None
    assert {name for name, figure in summary.figures.items() if figure.interval} == {"completed_share"}
    assert summary.about["load"] == {"request_rate": 2.0, "burstiness": 1.0, "num_prompts": 12}


def test_a_percentile_of_another_tool_needs_as_many_samples_as_ours(tmp_path: Path) -> None:
    for completed, known in ((10, True), (9, False)):
        (tmp_path / "result.json").write_text(json.dumps(changed("vllm_bench.json", completed=completed)))
        [summary] = read_vllm_bench(tmp_path / "result.json")
        assert (summary["median_ttft_ms"].value is not None) is known
        assert summary["mean_ttft_ms"].value is not None


def test_failed_requests_of_the_details_do_not_count() -> None:
    [summary] = read_vllm_bench(DATA / "vllm_bench_detailed.json")
    low, high = summary["mean_ttft_ms"].interval or (0, 0)
    assert 50 < low < summary["mean_ttft_ms"].value < high < 200  # type: ignore[operator]


def test_results_that_were_appended_are_several(tmp_path: Path) -> None:
    one = json.dumps(json.loads((DATA / "vllm_bench.json").read_text()))
    (tmp_path / "results.json").write_text(f"{one}\n{one}\n")
    assert len(read_vllm_bench(tmp_path / "results.json")) == 2


def test_names_in_appended_results_may_contain_other_separators_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    line = json.dumps(changed("vllm_bench.json", label="a\u2028b"), ensure_ascii=False)
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    assert [summary.about["target"]["label"] for summary in read_results(path)] == ["a\u2028b"] * 2


def test_a_report_of_guidellm_has_what_means_the_same() -> None:
    [summary] = read_guidellm(DATA / "guidellm.json")
    [vllm] = read_vllm_bench(DATA / "vllm_bench_detailed.json")
    assert summary.source == "guidellm 0.8.1"
    names = ["completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"]
    names += ["mean_ttft_ms", "std_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "mean_itl_ms", "mean_e2el_ms"]
    for name in names:
        assert summary[name].value == pytest.approx(vllm[name].value, rel=1e-3), name
    assert summary["mean_tpot_ms"].interval == pytest.approx(vllm["mean_tpot_ms"].interval)
    assert summary["max_concurrent_requests"].value == 3
    assert summary["std_itl_ms"].value is summary["p50_itl_ms"].value is None
    assert summary["request_goodput"].value is None
    assert summary.about == {"load": {"type_": "poisson", "rate": 2.0}, "incomplete": 2}


def test_a_report_that_holds_a_sample_of_its_requests_has_neither_intervals_nor_tpot(tmp_path: Path) -> None:
    report = json.loads((DATA / "guidellm.json").read_text())
    del report["benchmarks"][0]["requests"]["successful"][3:]
    (tmp_path / "report.json").write_text(json.dumps(report))
    [summary] = read_guidellm(tmp_path / "report.json")
    assert summary["mean_ttft_ms"].value is not None
    assert summary["mean_ttft_ms"].interval is None
    assert summary["mean_tpot_ms"].value is None


def changed(name: str, **changes: Any) -> Any:
    return json.loads((DATA / name).read_text()) | changes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ":1: no JSON"),
        ('{"a": 1}\n{"a"', ":2: no JSON"),
        ("[]", "neither of vllm bench serve nor of guidellm"),
        ("", "neither of vllm bench serve nor of guidellm"),
        (json.dumps(changed("vllm_bench.json", mean_ttft_ms="fast")), "mean_ttft_ms: expected a number, not 'fast'"),
        (json.dumps(changed("vllm_bench.json", duration=10**400)), "duration: expected a number, not 1000"),
        (json.dumps(changed("vllm_bench.json", duration=float("nan"))), "duration: expected a number, not nan"),
        (json.dumps(changed("vllm_bench_detailed.json", ttfts=[1])), "the lists of requests have different lengths"),
        (json.dumps(changed("vllm_bench.json", completed=-1)), "completed: expected a number, not -1"),
        (
            json.dumps(changed("vllm_bench.json", completed=13)),
            "completed: expected at most the 12 of num_prompts, not 13",
        ),
        (json.dumps(changed("vllm_bench_detailed.json", itls=[["x"]] * 12)), "itls: expected numbers"),
        (json.dumps(changed("vllm_bench_detailed.json", itls=[[1e300]] * 12)), "itls: expected numbers"),
        (json.dumps(changed("vllm_bench_detailed.json", input_lens=[{}] * 12)), "itls: expected numbers"),
        ('{"benchmarks": [{}]}', r"benchmarks\[0\].metrics.request_totals: it is missing"),
        ('{"benchmarks": [3]}', r"benchmarks\[0\]: expected an object, not 3"),
    ],
)
def test_damaged_results_name_the_file_and_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(RecordingError, match=message) as caught:
        read_results(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"none\.json: the results cannot be read: No such file"):
        read_results(tmp_path / "none.json")


@pytest.mark.parametrize("name", ["vllm_bench.json", "vllm_bench_detailed.json", "guidellm.json"])
def test_the_tool_is_recognized_and_its_summary_is_json(name: str) -> None:
    found: list[Summary] = read_results(DATA / name)
    assert [summary.source.split()[0] for summary in found] == [name.split("_")[0].removesuffix(".json")]
    json.dumps(found[0].as_json(), allow_nan=False)
