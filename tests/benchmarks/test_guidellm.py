"""The script that puts guidellm on a server. A small program plays guidellm."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import guidellm

GUIDELLM = """\
import json, sys
if sys.argv[1:] == ["--version"]:
    print("guidellm version: 0.8.0")
    sys.exit()
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
path = options["--output"].split("path=")[1]
counts = {"successful": 40, "errored": 0, "incomplete": 8, "total": 48}
report = {"benchmarks": [{"metrics": {"request_totals": counts}, "called": sys.argv[1:]}]}
json.dump(report, open(path, "w"))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path, script = tmp_path / "guidellm", tmp_path / "guidellm.py"
    script.write_text(GUIDELLM)
    # The first line of a script cannot name an interpreter in a directory with a space.
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    path.chmod(0o755)

    @contextmanager
    def served(model: str, flags: Sequence[str]) -> Iterator[int]:
        yield 8123

    monkeypatch.setattr(guidellm, "served", served)
    return path


def test_the_record_has_the_counts_of_both_endpoints(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["guidellm", "--guidellm", str(program), "--output", str(output)])
    guidellm.main()
    record = json.loads(output.read_text())
    counts = {"successful": 40, "errored": 0, "incomplete": 8, "total": 48}
    assert record["requests"] == dict.fromkeys(("/v1/completions", "/v1/chat/completions"), counts)
    assert record["guidellm"] == "guidellm version: 0.8.0"
    assert {"machine", "date", "commit", "model", "streams", "seconds"} <= record.keys()


def test_guidellm_is_called_with_the_endpoint_and_a_tokenizer_on_this_machine() -> None:
    called = guidellm.command("guidellm", 8123, "tiny-llama", "/v1/completions", Path("out.json"))
    options = dict(zip(called[3::2], called[4::2], strict=True))
    assert called[:3] == ["guidellm", "run", "--disable-console"]
    assert "target=http://127.0.0.1:8123,model=tiny-llama,request_format=/v1/completions" in options["--backend"]
    tokenizer = options["--tokenizer"].removeprefix("kind=huggingface_auto,model=")
    assert (Path(tokenizer) / "tokenizer.json").is_file()


def test_a_report_without_counts_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 entries request_totals"):
        guidellm.totals({"benchmarks": []})
