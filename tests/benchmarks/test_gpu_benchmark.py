"""`python -m benchmarks.gpu` off the GPU: every part runs at sizes of a toy, and one that fails costs no other."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import elementwise, gpu_tests, part, served, splitfuse, steps
from benchmarks.gpu.attention import Sequences
from benchmarks.gpu.llama import TOY, llama_engine, submit
from benchmarks.gpu.measuring import Bench, make_bench
from fastgen.compile.host.device import current
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.errors import FastgenError
from tests.fast import cases

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "kernels"))


def rows_of(name: str) -> list[Row]:
    said: list[Row] = []
    assert part.run(name, toy=True, say=said.append), said
    assert said[0]["limits"] == {"copy_bytes_per_s": 1e9, "gemm_flops_per_s": 1e9}
    rows = json.loads(json.dumps(said[1:]))
    assert rows
    assert not [row for row in rows if "error" in row]
    return rows


@pytest.mark.parametrize(
    "name", cases(["attention", "elementwise", "linear", "moe", "sampling"], fast=["attention", "moe"])
)
def test_kernels_are_gated_and_then_measured(name: str) -> None:
    rows = rows_of(name)
    gates = [row for row in rows if row["case"].startswith("numeric gate")]
    cases = [row for row in rows if row not in gates]
    assert gates
    assert rows[0] == gates[0]
    assert cases
    for row in cases:
        assert row["seconds"] > 0
        assert any(key.startswith("fraction_of_") and row[key] > 0 for key in row), row


@pytest.mark.slow
def test_decode_steps_are_told_apart_into_device_host_and_idle() -> None:
    capture, *cases = rows_of("decode")
    assert capture["graphs"] == 3 + 2  # sizes 1, 2, 4 and rows 1, 2
    assert capture["seconds_per_graph"] == pytest.approx(capture["seconds"] / 5)
    assert [(row["batch"], row["steps"]) for row in cases] == [(1, 3), (2, 3)]
    for row, context in zip(cases, (6, 8), strict=True):
        assert row["mean_context"] == pytest.approx(context, abs=2)
        assert 0 < row["device_seconds"] <= row["seconds"] + row["idle_seconds"]
        assert row["host_seconds"] == pytest.approx(row["seconds"] - row["device_seconds"])
        assert row["eager_seconds"] > 0


@pytest.mark.slow
def test_steps_without_graphs_choose_the_same_tokens() -> None:
    def answers(*, eager: bool) -> list[list[int]]:
        engine = llama_engine(TOY, current("cpu"), kv_tokens=200, max_num_seqs=2, token_budget=4)
        generations = submit(engine, [(3, 3), (6, 2)], seed=7)
        while engine.has_work:
            if eager:
                with steps.uncaptured(engine):
                    engine.step()
            else:
                engine.step()
        return [each.output().token_ids for each in generations]

    assert answers(eager=True) == answers(eager=False)


@pytest.mark.slow
def test_the_steady_state_counts_what_was_answered() -> None:
    (row,) = rows_of("splitfuse")
    assert row["requests"] >= 1
    assert row["requests_per_s"] == pytest.approx(row["requests"] / row["seconds"])
    assert set(row["step_seconds"]) == {"p50", "p90", "p95", "p99"}


def test_the_loop_keeps_as_many_requests_in_flight() -> None:
    bench = make_bench(toy=True)
    engine = llama_engine(TOY, bench.device, kv_tokens=200, max_num_seqs=2, token_budget=16, target="torch")
    loop = splitfuse.ClosedLoop(engine, TOY, 2, toy=True)
    run, in_flight = engine.step, []

    def counted_step() -> None:
        in_flight.append(len(engine.scheduler.unfinished))
        run()
        engine.check_integrity()

    engine.step = counted_step  # type: ignore[method-assign]
    for _ in range(12):
        loop.step()
    assert in_flight == [2] * 12
    before = loop.num_finished
    loop.forget()
    assert (loop.num_finished, loop.seconds) == (0, 0.0)
    assert before > 0


@pytest.mark.slow  # processes that import torch and transformers
@pytest.mark.parametrize("name", ["transformers", "start", "http"])
def test_other_processes_and_engines_run(name: str) -> None:
    cases = [row["case"] for row in rows_of(name)]
    expected = {
        "transformers": ["fastgen", "transformers", "transformers over fastgen"],
        "start": ["filling", "warm", "cold"],
        "http": ["start", "2 in flight"],
    }
    assert [case.split(",")[0] for case in cases] == expected[name]


def test_what_a_case_reads_is_there_before_it_runs_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def bench_on_another_stream(run: Any, **options: Any) -> float:
        asked.append("measure")
        return 2.0

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("wait"))
    monkeypatch.setattr(triton.testing, "do_bench_cudagraph", bench_on_another_stream)
    bench = replace(make_bench(toy=True), toy=False)
    assert bench.seconds(lambda: None) == pytest.approx(2e-3)
    assert asked == ["wait", "measure"]


def test_decodes_go_through_so_many_caches_that_none_is_still_held() -> None:
    bench = replace(make_bench(toy=True), toy=False)
    shape = AttentionShape(32, 8, 128, 64, "bf16", 128**-0.5)
    small, large = (bench.num_copies(each.kv_bytes(shape)) for each in (Sequences(1, 1023, 1), Sequences(256, 2047, 1)))
    assert isinstance(small, int)
    assert small > 16
    assert large == 1


def test_a_case_that_fails_is_a_row() -> None:
    bench = make_bench(toy=True)

    def fail() -> Row:
        raise MemoryError("too much")

    assert bench.attempt("large", fail) == {"case": "large", "error": "MemoryError: too much"}


def test_a_part_that_fails_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(bench: Bench) -> Iterator[Row]:
        yield {"case": "one", "seconds": 1.0}
        raise ValueError("no more")

    monkeypatch.setattr(splitfuse, "measure", measure)
    said: list[Row] = []
    assert not part.run("splitfuse", toy=True, say=said.append)
    assert said[1:] == [
        {"case": "one", "seconds": 1.0},
        {"case": "the rest of it", "error": "ValueError: no more"},
    ]


def test_a_part_whose_extra_is_missing_says_so_and_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def need_extra() -> None:
        raise FastgenError("serving needs the package fastapi: pip install it")

    monkeypatch.setattr(served, "need_extra", need_extra)
    said: list[Row] = []
    assert part.run("http", toy=True, say=said.append)
    assert said[1:] == [{"case": "all of it", "left_out": "serving needs the package fastapi: pip install it"}]


def test_a_gate_that_fails_ends_its_own_case_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "apply_rotary", lambda x, *_: x)
    said: list[Row] = []
    assert part.run("elementwise", toy=True, say=said.append)
    wrong = {row["case"] for row in said[1:] if "error" in row}
    assert wrong == {f"numeric gate, {name}" for name in ("qkv", "qkv_norm", "latent_kv")}
    measured = {row["case"] for row in said[1:] if "fraction_of_copy" in row}
    assert "RMS norm and residual × 5" in measured
    assert not [case for case in measured if "rotary" in case]


# ---- the command


def test_without_a_gpu_it_refuses_in_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert command.main(["--json", str(tmp_path / "found.json")]) == 2
    assert capsys.readouterr().err == "there is no GPU here to measure; --toy runs the code without one\n"
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        command.main(["--parts", "attention,nonsense"])
    assert "no part nonsense; there are tests, decode" in capsys.readouterr().err


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def found_by(code: str, seconds: float, file: Path) -> Row:
    results = command.Results(file, {})
    command.run_part("moe", seconds, results, python(code))
    kept: Row = json.loads(file.read_text())["parts"]["moe"]
    return kept


def test_rows_are_kept_from_a_part_that_dies(tmp_path: Path) -> None:
    code = 'import os, sys\nprint(\'{"case": "one"}\\nwarning\', flush=True)\nsys.stderr.write("lost")\nos._exit(3)'
    kept = found_by(code, 60, tmp_path / "found.json")
    assert kept["rows"] == [{"case": "one"}]
    assert (kept["ended"], kept["said"]) == ("with status 3", "lost")


@pytest.mark.slow  # the part has real seconds to begin in, and a busy machine may need them
def test_a_part_is_ended_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        'print(f\'{{"case": "one", "child": {child.pid}}}\', flush=True)\ntime.sleep(600)'
    )
    kept = found_by(code, 5, tmp_path / "found.json")
    assert kept["ended"] == "by the time limit"
    (row,) = kept["rows"]
    # a process that ended and that nobody has asked for yet is still listed, as a zombie
    status, end = Path(f"/proc/{row['child']}/status"), time.monotonic() + 60
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_all_parts_go_into_one_file_and_none_is_begun_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run_part(name: str, seconds: float, results: command.Results, given: list[str]) -> None:
        ran.append((name, given[1:]))
        results.begin(name)
        results.add(name, {"case": "one", "seconds": 0.5})
        results.add(name, {"seconds": 0.5})

    monkeypatch.setattr(command, "run_part", run_part)
    file = tmp_path / "new" / "found.json"
    assert command.main(["--toy", "--parts", "moe,sampling", "--json", str(file)]) == 0
    assert ran == [(name, ["-m", "benchmarks.gpu.part", name, "--toy"]) for name in ("moe", "sampling")]
    found = json.loads(file.read_text())
    assert found["parts"]["sampling"] == {"rows": [{"case": "one", "seconds": 0.5}], "seconds": 0.5}
    assert capsys.readouterr().out.splitlines()[1].split() == ["floor", "goal", "measured"]
    assert found["about"]["versions"]["torch"] == version("torch")
    assert found["about"]["device"] == current("cpu").name
    assert {"date", "commit", "processor", "cores"} <= found["about"].keys()
    late = tmp_path / "late.json"
    assert command.main(["--toy", "--parts", "moe", "--minutes", "0", "--json", str(late)]) == 0
    assert json.loads(late.read_text())["parts"] == {"moe": {"ended": "not begun: the time is over"}}
    left_out = "moe: not begun: the time is over, 0 rows\nto run them alone, into a file of their own: --parts moe\n"
    assert capsys.readouterr().out.startswith(left_out)


def test_the_last_lines_name_what_was_left_out() -> None:
    whole, row = {"rows": [{}], "seconds": 3.0}, {"case": "one"}
    assert command.left_out({"moe": whole}, ["moe"]) == ""
    late = {"rows": [row], "seconds": 9.0, "ended": "by the time limit"}
    parts = {"tests": whole, "decode": late, "start": {"rows": []}}
    assert command.left_out(parts, ["tests", "decode", "start", "moe"]).splitlines() == [
        "decode: by the time limit, 1 rows",
        "start: broken off, 0 rows",
        "moe: not begun, 0 rows",
        "to run them alone, into a file of their own: --parts decode,start,moe",
    ]


def test_what_is_printed_of_a_row() -> None:
    limits = {"limits": {"copy_bytes_per_s": 4.1e12, "gemm_flops_per_s": 7.9e14}}
    assert command.describe(limits) == "copy 4.10 TB/s, bf16 GEMM 790 TFLOP/s"
    row = {"case": "batch 1", "seconds": 0.0035, "fraction_of_copy": 0.9, "idle_seconds": 2e-5}
    assert command.describe(row) == "batch 1: 3.500 ms, 0.90 of copy, idle seconds 2e-05"
    rate = {"case": "10 s", "requests_per_s": 11.5, "gap_seconds": {"p50": 0.1}}
    assert command.describe(rate) == "10 s: requests per s 11.5"
    assert command.describe({"case": "http", "left_out": "no fastapi"}) == "http: no fastapi"
    assert command.describe({"case": "batch 256", "error": "too large"}) == "batch 256: too large"


def test_marked_tests_become_rows(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_good(): pass\n\n"
        "@pytest.mark.gpu\ndef test_bad(): assert 1 == 2\n\ndef test_other(): pass\n"
    )
    (tmp_path / "test_without.py").write_text("import nothing_of_the_kind\n")
    assert gpu_tests.files_of(tmp_path) == [file]
    good, bad = gpu_tests.run([file], "gpu", "-n0")
    assert good["case"].endswith("test_good")
    assert "error" not in good
    assert "assert 1 == 2" in bad["error"]


def test_there_are_marked_tests_for_each_kind_of_kernel_and_for_a_whole_engine() -> None:
    files = {file.name for file in gpu_tests.files_of(gpu_tests.ROOT / "tests")}
    assert files >= {"test_cuda_graph.py", "test_on_a_gpu.py"}
    assert files >= {f"test_triton_{name}.py" for name in ("attention", "elementwise", "moe", "qkv", "sampling")}
    assert files >= {"test_few_row_linear.py", "test_norm_kernels.py", "test_quantized_weight.py"}
    assert files >= {"test_run_ahead_triton.py", "test_parity_triton.py", "test_quantized_triton.py"}
    assert os.environ["TRITON_INTERPRET"] == "1"
