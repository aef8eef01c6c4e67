"""Engine processes that a test plays: what the server's side does with their messages, their silence and their ends."""

from __future__ import annotations

import asyncio
import io
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

from fastgen.serving.engine.client import EngineClient
from fastgen.serving.engine.messages import EngineFacts, Ready, ToEngine, ToServer, encoder, has_come, to_engine

WAIT_S = 60.0
FACTS = EngineFacts(
    directory="",
    architecture="",
    recipe="",
    vocab_size=1000,
    max_model_len=4096,
    max_num_seqs=4,
    token_budget=512,
    block_size=16,
    num_blocks=1000,
    ledger="",
    load_s=2.5,
)


class FakeProcess:
    """Takes the place of ``subprocess.Popen``. It is ready at once, and then does nothing by itself."""

    pid = 0

    def __init__(self, command: list[str], *, env: dict[str, str], context: zmq.Context[Any], **more: Any):
        self.env, self.stdin = env, io.BytesIO()
        self.status: int | None = None
        self.has_ended = threading.Event()
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(command[-2])
        self.send(Ready(FACTS))

    def send(self, message: ToServer) -> None:
        self._socket.send(encoder.encode(message))

    async def next(self, kind: type[ToEngine]) -> Any:
        """Returns the next message of a kind from the server."""
        async with asyncio.timeout(WAIT_S):
            while True:
                while not has_come(self._socket):
                    await asyncio.sleep(0.001)
                if isinstance(message := to_engine.decode(self._socket.recv()), kind):
                    return message

    def wait(self) -> int:
        self.has_ended.wait()
        assert self.status is not None
        return self.status

    def die(self, status: int) -> None:
        if not self.has_ended.is_set():
            self.status = status
            self._socket.close()
            self.has_ended.set()

    def kill(self) -> None:
        self.die(-signal.SIGKILL)


@asynccontextmanager
async def fake_processes(engine: EngineClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[FakeProcess]]:
    """Yields the processes that ``engine`` has started, the latest last. It is stopped when the block is left."""
    started: list[FakeProcess] = []
    with zmq.Context() as context:

        def start(command: list[str], **more: Any) -> FakeProcess:
            started.append(FakeProcess(command, context=context, **more))
            return started[-1]

        monkeypatch.setattr("fastgen.serving.engine.supervisor.subprocess.Popen", start)
        try:
            async with asyncio.timeout(WAIT_S):
                yield started
        finally:
            await engine.stop(0.0)
            for process in started:
                process.kill()
