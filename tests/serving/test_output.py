"""A server whose standard streams are closed, full, or a pipe without a reader."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys

import pytest

from fastgen.serving.output import write_text
from tests.serving.http_client import get
from tests.serving.server_process import WAIT_S, served_by_shell


@pytest.mark.slow  # tests/serving/test_log.py counts the lines that a full pipe loses
def test_a_server_whose_output_is_full_serves_and_counts_what_is_lost() -> None:
    with served_by_shell('exec "$@" >/dev/full 2>/dev/full', "tiny-llama", "--log-requests") as server:
        for _ in range(3):
            assert asyncio.run(get(server.address, "/health"))[0] == 200
        metrics = asyncio.run(get(server.address, "/metrics"))[1].decode()
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

    with served_by_shell('exec "$@" <&- >&-', "tiny-llama", "--log-requests", stderr=writing) as server:
        os.close(writing)
        asyncio.run(ask(server.address))
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
