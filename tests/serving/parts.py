"""A server in this process whose parts only note what is asked of them."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.serving import run as serving_run
from fastgen.serving.options import ServeOptions

WAIT_S = 120.0


class Parts:
    """The parts of a server, which note what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        self.service_given: dict[str, Any] = {}
        # The address that gRPC is to listen at.
        self.grpc_at: str | None = None
        self.http = SimpleNamespace(
            should_exit=False,
            server_state=SimpleNamespace(connections=[]),
            serve_at=self._serve,
            leave=lambda: self.calls.append("HTTP leaves"),
        )
        grpc = SimpleNamespace(
            address=None,
            start=self._noting("gRPC starts"),
            leave=self._noting("gRPC leaves"),
            stop=self._noting("gRPC stops"),
        )
        service = SimpleNamespace(
            metrics=SimpleNamespace(log_line_dropped=None),
            model_name="m",
            facts=SimpleNamespace(ledger="total 3 MiB", tokenizer_class="Any"),
            engine=SimpleNamespace(failed=self._never),
            start=self._noting("the engine starts"),
            drain=self._noting("the engine drains"),
            stop=self._noting("the engine stops"),
        )

        def make_service(arguments: Any, **given: Any) -> Any:
            self.service_given = given
            return service

        def make_grpc(*given: Any, address: str, is_shared: bool) -> Any:
            self.grpc_at = address
            self.calls.append(f"gRPC{' shares its port' * is_shared}")
            return grpc

        for name, value in {
            "Service": make_service,
            "GrpcServer": make_grpc,
            "HttpServer": lambda *given: self.http,
            "create_app": lambda *given: SimpleNamespace(include_router=lambda routes: None),
            "terminate_routes": lambda ending: None,
            "prepare": self._noting("prepared"),
            "close_slow": self._noting("closed"),
            "within_file_limit": lambda options: options,
            "registered": lambda deployment: nullcontext(),
            "write_text": lambda *given: None,
            "listen": self._bound("has"),
            "bind_shared": self._bound("shares"),
        }.items():
            monkeypatch.setattr(serving_run, name, value)

    def _noting(self, what: str) -> Any:
        async def called(*given: Any) -> None:
            if what not in ("prepared", "closed"):
                self.calls.append(" ".join([what, *(f"{each:g}" for each in given)]))

        return called

    async def _never(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def _serve(self, listener: Any) -> None:
        while not self.http.should_exit:
            await asyncio.sleep(0.001)

    def _bound(self, how: str) -> Any:
        def bind(host: str, port: int) -> Any:
            self.calls.append(f"{how} {host}:{port}")
            return SimpleNamespace(
                listen=lambda backlog: self.calls.append(f"listens at {port}"),
                close=lambda: self.calls.append(f"closes {port}"),
                getsockname=lambda: (host, port),
            )

        return bind

    def serve(self, *, make_engine: Any = None, **given: Any) -> None:
        """Serves until a signal comes, which comes as soon as the server is ready."""
        log: Any = SimpleNamespace(flush=lambda: None)
        options = ServeOptions(drain_timeout_s=7.5, engine_timeout_s=8.5, name="m", port=81, **given)

        def ready(deployment: Any) -> None:
            self.calls.append(f"ready at {deployment.address}")
            os.kill(os.getpid(), signal.SIGTERM)

        async def run() -> None:
            async with asyncio.timeout(WAIT_S):
                await serving_run._run({"model": "m"}, options, ready, lambda: None, log, make_engine)

        asyncio.run(run())
