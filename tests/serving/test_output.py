"""A server whose standard streams are closed, full, or a pipe without a reader."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fastgen.serving.clients.deployments import deployments
from fastgen.serving.output import write_text
from tests.serving.http_client import get

WAIT_S = 120.0
SERVE = [sys.executable, "-m", "fastgen", "serve", "tiny-llama", "--port", "0"]


@contextmanager
def serving(redirection: str, *flags: str, stderr: int | None = None) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Runs a server whose streams a shell redirects: only that can close them. Yields it with its address."""
    command = ["bash", "-c", f'exec "$@" {redirection}', "bash", *SERVE, *flags]
    with subprocess.Popen(command, stderr=stderr) as process:
        try:
            end_s = time.monotonic() + WAIT_S
            while not (found := [one for one in deployments() if one.pid == process.pid]):
                assert process.poll() is None, f"the server ended with status {process.returncode}"
                assert time.monotonic() < end_s
                time.sleep(0.05)
            yield process, found[0].address
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


@pytest.mark.slow  # tests/serving/test_log.py counts the lines that a full pipe loses
def test_a_server_whose_output_is_full_serves_and_counts_what_is_lost() -> None:
    with serving(">/dev/full 2>/dev/full", "--log-requests") as (_, address):
        for _ in range(3):
            assert asyncio.run(get(address, "/health"))[0] == 200
        metrics = asyncio.run(get(address, "/metrics"))[1].decode()
    num_lost = re.search(r"^fastgen_log_lines_dropped_total (\S+)", metrics, re.MULTILINE)
    assert num_lost is not None
    assert float(num_lost[1]) > 0


@pytest.mark.slow
def test_a_log_that_nobody_reads_stops_nothing_and_begins_with_what_is_loaded() -> None:
    """Standard input and output are closed, too."""
    reading, writing = os.pipe()
    path = "/" + "x" * 500  # so that fewer lines fill the pipe

    async def ask(address: str) -> None:
        for _ in range(300):
            async with asyncio.timeout(WAIT_S):
                assert (await get(address, path))[0] == 404

    with serving("<&- >&-", "--log-requests", stderr=writing) as (process, address):
        os.close(writing)
        asyncio.run(ask(address))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0, "nor does it wait for ever for its last lines"
    with open(reading) as log:
        assert log.readline() == "fastgen: loading tiny-llama; its address is printed once it is served\n"


def test_closed_streams_are_the_null_device() -> None:
    code = "from fastgen.serving.output import open_closed_streams; open_closed_streams(); "
    code += "import os; os.write(1, b'a'); os.write(2, b'b'); assert os.read(0, 1) == b''"
    done = subprocess.run(["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code], check=False)
    assert done.returncode == 0


def test_programs_that_a_server_starts_have_its_null_devices_too() -> None:
    code = "from fastgen.serving.output import open_closed_streams; open_closed_streams(); "
    code += "import os; assert all(os.get_inheritable(number) for number in range(3)); os.fstat(2)"
    done = subprocess.run(["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code], check=False)
    assert done.returncode == 0


def test_a_text_is_written_whole_however_little_the_system_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    write = os.write
    with os.fdopen(reading, "rb") as found, os.fdopen(writing, "wb"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
            write_text(writing, "the address")
        write_text(writing, "next")
        assert os.read(found.fileno(), 1000) == b"the address\nnext\n"


def test_a_text_that_nobody_takes_is_lost() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb"):
        write_text(writing, "the address")
