"""``fastgen bench``: what it prints and writes, how it refuses, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fastgen.cli.bench_options import BatchOptions
from fastgen.errors import InvalidArgumentError
from fastgen.lab.metrics.figures import UNITS
from fastgen.lab.metrics.goodput import SLO
from fastgen.lab.metrics.summary import summarize
from fastgen.lab.records import read_run
from tests.cli.conftest import Run
from tests.lab.load.fake_endpoint import WAIT_S, fake_endpoint

SMALL = ("--workload", "fixed:prompt=9,answer=6,n=12", "--tokenizer", "tiny-llama")
ENGINE = ("--num-threads", "1", "--max-num-seqs", "4")


def test_a_run_is_printed_and_written(run: Run, tmp_path: Path) -> None:
    with fake_endpoint(first_s=0.02, gap_s=0.005) as fake:
        done = run(
            *("bench", "serve", "--base-url", fake.url, *SMALL, "--max-concurrency", "3"),
            *("--goodput", "ttft:2000", "tpot:1000", "--output", str(tmp_path / "new" / "results")),
        )
    assert done.status == 0
    lines = done.out.splitlines()
    assert re.fullmatch(r"12 requests answered, 0 failed, in [\d.]+ s; at most 3 at once", lines[0])
    assert lines[2].split() == ["ms", "mean", "median", "p90", "p95", "p99"]
    (ttft,) = (line for line in lines if line.startswith("TTFT"))
    assert re.match(r"TTFT  [\d.]+ \[[\d.]+, [\d.]+\]  [\d.]+ \[[\d.]+, [\d.]+\]  –", ttft)
    assert "(ttft 2000, tpot 1000)" in done.out
    assert re.search(r"good requests +100.0 % \[75.\d %, 100.0 %\]", done.out)
    assert "–: too few samples to say" in done.out
    assert "load generator: P99 of its delay in sending " in done.out
    records, summary = sorted((tmp_path / "new" / "results").iterdir(), key=lambda file: file.suffix, reverse=True)
    assert f"records: {records}" in done.err
    assert f"summary: {summary}" in done.err
    found = read_run(records)
    assert len(found.complete) == 12
    assert found.header.load["clients"] == 3
    facts = json.loads(summary.read_text())
    assert facts.keys() >= UNITS.keys()
    assert facts == json.loads(json.dumps(summarize(found, slo=SLO(ttft_ms=2000, tpot_ms=1000)).as_json()))


def test_chats_are_measured_as_well(run: Run) -> None:
    chat = ("--endpoint", "/v1/chat/completions")
    with fake_endpoint() as fake:
        done = run("bench", "serve", "--base-url", f"{fake.url}/v1", *SMALL, *chat, "--json")
        refused = run("bench", "serve", "--base-url", fake.url, *chat)
    assert done.status == 0, done.err
    facts = json.loads(done.out)
    assert (facts["completed"], facts["target"]["endpoint"], facts["target"]["prompts"]) == (12, chat[1], "messages")
    assert refused.status == 1
    assert "takes messages of text, not token ids: name the model's tokenizer (--tokenizer)" in refused.err


def test_prompts_are_sent_as_text_where_that_is_asked_for(run: Run) -> None:
    as_text = ("--prompts", "text")
    with fake_endpoint() as fake:
        flags = (*SMALL, *as_text, "--tokenizer", "tiny-llama", "--json")
        done = run("bench", "serve", "--base-url", fake.url, *flags)
        assert done.status == 0, done.err
        assert json.loads(done.out)["target"]["prompts"] == "text"
        assert isinstance(fake.bodies[-1]["prompt"], str)
        refused = run("bench", "serve", "--base-url", fake.url, *as_text, "--endpoint", "/generate")
    assert "prompts are sent as text only with the model's tokenizer: name it (--tokenizer)" in refused.err
    assert "--prompts text is for a server" in run("bench", "serve", "tiny-llama", *as_text).err
    assert "expected ids or text" in run("bench", "serve", "tiny-llama", "--prompts", "words").err


def test_open_loops_are_those_of_the_flags(run: Run) -> None:
    def load(*flags: str) -> dict[str, object]:
        with fake_endpoint() as fake:
            done = run("bench", "serve", "--base-url", fake.url, *SMALL, "--json", "--seed", "3", *flags)
        assert done.status == 0, done.err
        facts: dict[str, object] = json.loads(done.out)["load"]
        return facts

    assert load("--request-rate", "200")["arrivals"] == {"name": "poisson", "rate": 200.0, "seed": 3}
    bursty = load("--request-rate", "200", "--burstiness", "0.5")["arrivals"]
    assert bursty == {"name": "gamma", "rate": 200.0, "burstiness": 0.5, "seed": 3}
    assert load("--request-rate", "inf")["arrivals"] == {"name": "at once", "seed": 3}
    assert load("--num-warmups", "2") == {"loop": "open", "arrivals": {"name": "at once", "seed": 3}, "warm_ups": 2}
    assert load("--arrivals", "constant:rate=300")["arrivals"] == {"name": "constant", "rate": 300.0, "seed": 3}
    ramp = load(*("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "100", "--ramp-up-end-rps", "300"))
    assert ramp["arrivals"] == {
        "name": "ramp", "start": 100.0, "end": 300.0, "shape": "linear", "burstiness": 1.0, "seed": 3
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--request-rate", "3", "--max-concurrency", "4"), "--request-rate and --max-concurrency: give one."),
        (("--burstiness", "3"), "--burstiness goes with --request-rate"),
        (("--ramp-up-strategy", "linear"), "a ramp needs --ramp-up-strategy, --ramp-up-start-rps"),
        (("--with-server",), "give one of the two"),
        (("--max-num-seqs", "3"), "--max-num-seqs: that is up to the server"),
        (("--workload", "fixd"), "did you mean 'fixed'?"),
        (("--workload", "fixed:promt=3"), "did you mean 'prompt'?"),
        (("--goodput", "ttft:fast"), "'fast' is not a number"),
        (("--goodput", "tfft:3"), "expected LIMIT:NUMBER"),
        (("--request-rate", "0"), "expected a number above 0"),
        (("--arrivals", "sometimes"), "'sometimes' is not known"),
        (("--endpoint", "/v2"), "/v2 is not known"),
        (("--tokenizer", "./nowhere"), "the tokenizer of './nowhere' cannot be had"),
        (("--output", "/dev/null/x"), "--output /dev/null/x cannot be made"),
    ],
)
def test_bad_input_gets_a_sentence(run: Run, flags: tuple[str, ...], said: str) -> None:
    with fake_endpoint() as fake:
        done = run("bench", "serve", "--base-url", fake.url, "--tokenizer", "tiny-llama", *flags)
    assert done.status in (1, 2)
    assert said in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_a_number_of_batches_is_whole() -> None:
    assert BatchOptions(num_iters_warmup=0).num_iters_warmup == 0
    for wrong in (-1, 2.5, True):
        with pytest.raises(InvalidArgumentError, match=f"num_iters_warmup={wrong}: expected an integer of at least 0"):
            BatchOptions(num_iters_warmup=wrong)  # type: ignore[arg-type]


def test_what_is_measured_must_be_named(run: Run) -> None:
    assert "MODEL is missing" in run("bench", "serve").err
    assert "MODEL is missing" in run("bench", "throughput", "--with-server").err
    assert "--goodput is missing" in run("bench", "search", "tiny-llama").err
    with fake_endpoint() as fake:
        done = run("bench", "serve", "--base-url", fake.url)
    assert done.err == "fastgen: the server does not say which tokens its model has: name it with --tokenizer\n"


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    with fake_endpoint(endless_from=6) as fake:
        command = [sys.executable, "-m", "fastgen", "bench", "serve", "--base-url", fake.url, *SMALL]
        command += ["--max-concurrency", "2", "--output", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            for _ in range(6):
                assert fake.answered.acquire(timeout=WAIT_S)
            until_s = time.monotonic() + WAIT_S
            while fake.in_flight < 2 and time.monotonic() < until_s:  # both clients have sent one that has no end
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "fastgen: interrupted: the figures are of what was measured until then" in err
    assert "Traceback" not in err
    assert "4 requests answered" in out
    (file,) = tmp_path.glob("*.jsonl")
    found = read_run(file)
    assert found.header.interrupted
    assert len(found.complete) == 4, "two of the six were warm-ups"
    assert {record.error for record in found.records if record.error} == {
        "the run was interrupted before the answer was whole"
    }
    (summary,) = tmp_path.glob("*.json")
    assert json.loads(summary.read_text())["interrupted"]


@pytest.mark.slow
def test_ctrl_c_before_anything_was_measured_leaves_no_file(tmp_path: Path) -> None:
    with fake_endpoint(endless_from=0) as fake:
        command = [sys.executable, "-m", "fastgen", "bench", "serve", "--base-url", fake.url, *SMALL]
        with subprocess.Popen([*command, "--output", str(tmp_path)], stderr=subprocess.PIPE, text=True) as process:
            assert fake.arrived.wait(WAIT_S)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode != 0
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_search_says_by_how_much_limits_are_missed(run: Run, tmp_path: Path) -> None:
    with fake_endpoint(first_s=0.02) as fake:
        done = run(
            *("bench", "search", "--base-url", fake.url, *SMALL, "--goodput", "ttft:5", "e2el:100000"),
            *("--output", str(tmp_path)),
        )
    assert done.status == 0
    assert "No load was found that keeps 90 % of requests within ttft 5, e2el 100000." in done.out
    assert re.search(r"With clients = 1, 0 % of requests keep ttft 5 ms; it would have to be [\d.]+ ms, ", done.out)
    assert [len(read_run(file).records) for file in tmp_path.glob("*.jsonl")] == [36]
    (facts,) = (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    assert (facts["highest_kept"], facts["lowest_missed"], facts["levels"][0]["verdict"]) == (None, 1, "missed")


def test_a_search_by_rate_ends_where_requests_fail(run: Run) -> None:
    with fake_endpoint(dies_after=900) as fake:
        done = run(
            *("bench", "search", "--base-url", fake.url, "--tokenizer", "tiny-llama", "--json"),
            *("--workload", "fixed:prompt=9,answer=3", "--num-prompts", "40", "--search-by", "rate"),
            *("--goodput", "ttft:10000", "--start", "60", "--seconds", "1", "--max-repeats", "1", "--resolution", "2"),
        )
    assert done.status == 0, done.err
    facts = json.loads(done.out)
    assert facts["search_by"] == "rate"
    assert facts["levels"][0]["level"] == 60
    assert facts["levels"][0]["verdict"] == "kept"
    assert facts["levels"][0]["requests"] == 60
    assert facts["lowest_missed"] is not None


@pytest.mark.slow
def test_an_engine_in_this_process(run: Run, tmp_path: Path) -> None:
    flags = ("--workload", "fixed:prompt=20,answer=8,n=12", *ENGINE, "--json", "--output", str(tmp_path))
    done = run("bench", "throughput", "tiny-llama", *flags)
    assert done.status == 0, done.err
    facts = json.loads(done.out)
    assert (facts["completed"], facts["failed"], facts["total_output_tokens"]) == (12, 0, 96)
    assert facts["target"]["model"] == "tiny-llama"
    assert facts["target"]["engine"]["max_num_seqs"] == 4
    assert facts["target"]["load"] == {"max_num_seqs": 4, "num_threads": 1}
    assert facts["machine"]["cores"] == os.cpu_count()


def test_latency_of_a_batch(run: Run, tmp_path: Path) -> None:
    shape = ("--batch-size", "2", "--input-len", "8", "--output-len", "4", "--num-iters", "10")
    done = run("bench", "latency", "tiny-llama", *shape, *ENGINE, "--output", str(tmp_path))
    assert done.status == 0, done.err
    assert done.out.startswith("10 batches, from ")
    assert re.search(r"a batch  [\d.]+ \[[\d.]+, [\d.]+\]", done.out)
    (records,) = tmp_path.glob("*.jsonl")
    assert len(read_run(records).complete) == 20


def test_policies_in_turns(run: Run, tmp_path: Path) -> None:
    asked = (
        "--workload",
        "fixed:prompt=20,answer=8,n=10",
        "--policy",
        "orca",
        "--policy",
        "splitfuse",
        "--rounds",
        "2",
    )
    done = run("bench", "policies", "tiny-llama", *asked, *ENGINE, "--output", str(tmp_path))
    assert done.status == 0, done.err
    header, *rows = done.out.splitlines()
    assert header.split()[:2] == ["requests/s", "output"]
    assert [row.split()[0] for row in rows] == ["orca", "splitfuse"]
    runs = [read_run(file) for file in sorted(tmp_path.glob("*.jsonl"))]
    assert [run.header.target["engine"]["policy"] for run in runs] == ["orca", "orca", "splitfuse", "splitfuse"]
    assert all(len(run.complete) == 10 for run in runs)


def test_a_server_that_is_started_for_the_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_DEPLOYMENTS", str(tmp_path))
    chats = ("--workload", "chats:n=3,turns=2,prompt=16,answer=8", "--max-concurrency", "2")
    done = run("bench", "serve", "tiny-llama", "--with-server", "--endpoint", "/generate", *chats, *ENGINE, "--json")
    assert done.status == 0, done.err
    facts = json.loads(done.out)
    assert (facts["completed"], facts["total_input_tokens"], facts["total_output_tokens"]) == (6, 3 * (16 + 40), 48)
    assert facts["target"]["tokens_counted_by"] == "token ids of each chunk"
    assert not list(tmp_path.glob("*.json")), "the server has ended"


def test_startup_is_printed_and_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def sample(load: dict[str, Any], cache: Path) -> dict[str, float]:
        asked.append(load)
        return {"imported": 1.0, "loaded": 2.0 + len(asked), "first_token": 9.0}

    monkeypatch.setattr("fastgen.lab.experiments.startup._sample", sample)
    flags = ("--num-iters-cold", "1", "--num-iters-warm", "3", "--dtype", "float32")
    done = run("bench", "startup", "tiny-llama", *flags, "--output", str(tmp_path))
    assert done.out.splitlines() == [
        "s                  processes  imported           loaded             first token",
        "cold kernel cache  1          1.00               3.00               9.00",
        "warm kernel cache  3          1.00 [1.00, 1.00]  5.00 [4.00, 6.00]  9.00 [9.00, 9.00]",
        "",
        "Median [least, most], from the start of the process.",
    ]
    assert asked == [{"model": "tiny-llama", "dtype": "float32"}] * 4
    (file,) = tmp_path.iterdir()
    facts = json.loads(file.read_text())
    assert (facts["cold_startup_times"], facts["avg_warm_startup_time"]) == ([3.0], 5.0)
    none = run("bench", "startup", "tiny-llama", "--num-iters-cold", "0", "--num-iters-warm", "0")
    assert "there is nothing to measure" in none.err


def test_workloads_and_foreign_results(run: Run, tmp_path: Path) -> None:
    listed = run("bench", "workloads")
    assert listed.status == 0
    assert re.search(r"^paper: ", listed.out, re.MULTILINE)
    assert re.search(r"^ramp: ", listed.out, re.MULTILINE)
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert run("bench", "import", str(file)).err.startswith(f"fastgen: {file}: these are results neither of vllm")


def test_every_flag_has_its_default_in_the_help(run: Run) -> None:
    for command in ("serve", "throughput", "latency", "startup", "policies", "search", "import"):
        _, _, listed = run("bench", command, "--help").out.partition("Options:\n")
        for text in re.split(r"^  (?=-)", listed, flags=re.MULTILINE)[1:-1]:
            assert re.search(r"Default: |\[default: ", " ".join(text.split())), (command, text)
