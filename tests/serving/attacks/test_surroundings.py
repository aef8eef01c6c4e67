"""Small instances of the attacks on a server in bad surroundings, and what it makes of these."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.serving.clients.deployments import deployments
from tests.serving.attacks import connections, grpc_connections, helpers, log_lines
from tests.serving.attacks.harness import HONEST, MODEL, Attack, Target, observed
from tests.serving.attacks.storm import target_of
from tests.serving.attacks.surroundings import LEFT, badly_placed
from tests.serving.http_client import RawClient, ask
from tests.serving.server_process import ServerProcess

# So many files are too few for the connections that a server takes by default. What remains is for these.
MAX_FILES, NUM_CONNECTIONS = 560, (560 - 256) // 3
# Short, so that attacks that wait for these limits take some seconds.
LIMITS = ("--header-timeout", "2", "--keep-alive", "2", "--body-timeout", "3", "--write-timeout", "2")
IDLE = grpc_connections.ATTACKS | {"idle_connections": connections.ATTACKS["idle_connections"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def badly(place: Path) -> Iterator[ServerProcess]:
    with badly_placed(place, "--grpc-port", "0", *LIMITS, max_files=MAX_FILES) as server:
        yield server


def small(attack: Attack, target: Target) -> None:
    asyncio.run(attack.run(target, attack.small))


def test_helpers_and_the_log_hold_up_no_other_request(badly: ServerProcess) -> None:
    """A helper process that stands still is given half a minute, in which the others run."""
    target, found = target_of(badly), list[BaseException]()

    def stop_helpers() -> None:
        try:
            small(helpers.ATTACKS["stopped_helpers"], target)
        except BaseException as error:
            found.append(error)

    with observed(badly) as seen:
        small(helpers.ATTACKS["killed_helpers"], target)
        stopping = threading.Thread(target=stop_helpers)
        stopping.start()
        small(helpers.ATTACKS["slow_texts"], target)
        small(log_lines.ATTACKS["many_log_lines"], target)
    assert max(seen.gaps_s) < 1.0
    assert max(seen.health_s) < 1.0
    assert seen.memory_growth < 300 << 20, "four processes that encode texts"
    stopping.join(helpers.WAIT_S)
    assert not stopping.is_alive()
    assert found == []


@pytest.mark.parametrize("name", IDLE)
def test_what_asks_for_nothing_delays_nobody(badly: ServerProcess, name: str) -> None:
    with observed(badly) as seen:
        small(IDLE[name], target_of(badly))
    assert max(seen.gaps_s) < 1.0
    assert max(seen.health_s) < 1.0
    assert seen.memory_growth < 64 << 20


def test_connections_beyond_what_it_may_open_are_refused_in_words(badly: ServerProcess) -> None:
    async def run() -> None:
        clients = [await RawClient.connect(badly.address) for _ in range(NUM_CONNECTIONS * 3 // 2)]
        for client in clients:
            client.writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        heads = [await client.head() for client in clients]
        assert [status for status, _ in heads].count(200) == NUM_CONNECTIONS
        assert {status for status, _ in heads} == {200, 429}
        for client in clients:
            client.leave()
        async with asyncio.timeout(helpers.WAIT_S):
            while (await ask(badly.address, HONEST | {"max_tokens": 4})).status == 429:
                await asyncio.sleep(0.01)  # until the server has noticed that they have gone

    asyncio.run(run())


def test_a_killed_servers_directory_is_gone(badly: ServerProcess, place: Path) -> None:
    assert not (place / "temporary" / LEFT).exists()
    assert any((place / "temporary").glob("fastgen-engine-*")), "its own is there"


def test_it_is_found_among_what_is_no_server(badly: ServerProcess) -> None:
    (found,) = deployments()
    assert found.pid == badly.process.pid


def test_a_checkpoint_that_links_to_another_file_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:x:0:0")
    checkpoint = shutil.copytree(BUILTINS[MODEL], tmp_path / "checkpoint")
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "chat_template.jinja").symlink_to(tmp_path / "secret")
    command = [sys.executable, "-m", "fastgen", "serve", str(checkpoint), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "chat_template.jinja: is a link to" in done.stderr
    assert "root:x:0:0" not in done.stdout + done.stderr
