"""Tables group runs into series, name them by what sets them apart, and put intervals beside figures."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from fastgen.lab.metrics.summary import summarize
from fastgen.lab.records import write_run
from fastgen.lab.report.points import Measured
from fastgen.lab.report.results import Result, read_directory
from fastgen.lab.report.series import series, swept
from fastgen.lab.report.table import number, print_table, rows, with_interval
from tests.lab.report.made_runs import fill, made_run


def made_result(policy: str, clients: int) -> Result:
    return Result(file=f"{policy}_{clients}", summary=summarize(made_run(policy, clients, gap_s=0.05)))


def test_runs_of_one_policy_are_a_series_in_the_order_of_clients() -> None:
    found = series([made_result(policy, clients) for clients in (4, 1, 2) for policy in ("orca", "splitfuse")])
    assert [(each.label, [one.file for one in each.results]) for each in found] == [
        ("orca", ["orca_1", "orca_2", "orca_4"]),
        ("splitfuse", ["splitfuse_1", "splitfuse_2", "splitfuse_4"]),
    ]


def test_the_load_is_what_differs() -> None:
    assert swept([made_result("orca", 1), made_result("orca", 2)]) == ("load.clients", "clients")
    assert swept([made_result("orca", 1), made_result("splitfuse", 1)]) is None


def test_a_single_series_has_the_name_of_its_workload() -> None:
    assert [each.label for each in series([made_result("orca", 1)])] == ["made"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (Measured(12.345), "12.3"), (Measured(1234.5, 1199.9, 1300.0), "1,234 [1,200, 1,300]")],
)
def test_a_figure_is_shown_with_its_interval(value: Measured | None, shown: str) -> None:
    assert with_interval(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (0.01234, "0.0123"), (99.96, "100"), (12.0, "12.0")])
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert number(value) == shown


def test_the_terminal_names_the_runs_that_must_not_be_used(tmp_path: Path) -> None:
    fill(tmp_path)
    results = read_directory(tmp_path).results
    out = io.StringIO()
    print_table(results, Console(file=out, width=160))
    printed = out.getvalue()
    assert len(rows(results)) == 8
    assert "not used (8)" in printed
    assert "(8) late.jsonl: invalid: requests were sent up to 2.1 s late" in printed
    assert "stopped.jsonl: interrupted" in printed


def test_results_of_other_tools_stand_beside_our_own(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[1] / "data", tmp_path, dirs_exist_ok=True)
    write_run(made_run("orca", 4, gap_s=0.05), tmp_path / "own.jsonl")
    (tmp_path / "own.json").write_text(json.dumps(summarize(made_run("orca", 4, gap_s=0.05)).as_json()))
    found = rows(read_directory(tmp_path).results)
    assert [each.file for each in found if each.file.startswith("own")] == ["own.jsonl"]
    assert {"vllm_bench.json", "vllm_bench_detailed.json", "guidellm.json"} <= {each.file for each in found}
    assert any("vllm bench" in each.label for each in found)
