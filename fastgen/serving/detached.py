"""A server that outlives the program that started it: :func:`serve`, and the process it starts.

The process reads the arguments as JSON on standard input, and reports through a pipe that it is ready, or why it cannot
be. Until then its output goes to the terminal, if there is one, and afterwards to a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastgen.arguments import show_arguments
from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.options import LoadOptions
from fastgen.runtime.scheduling.policies import Policy, policy_name
from fastgen.serving.arguments import check_names, sort_arguments
from fastgen.serving.clients.client import Client
from fastgen.serving.clients.connect import Protocols, connect
from fastgen.serving.clients.deployments import Deployment, make_deployments_directory
from fastgen.serving.extra import need_extra
from fastgen.serving.monitoring.log_file import LOG_VARIABLE, move_output_to_log
from fastgen.serving.options import ServeOptions


def serve(model: str | Path, *, api_key: str | None = None, protocol: Protocols = "http", **arguments: Any) -> Client:
    """Starts a server of ``model`` that outlives this program, and returns a client of it.

    ``api_key`` and ``protocol`` are the client's; ``protocol="grpc"`` needs a ``grpc_port``. The other arguments are
    those of :func:`fastgen.load` and of serving. The server is the one that ``fastgen serve`` starts with these flags,
    but its output goes to a file beside its entry in the list of deployments once it is ready. It ends by
    :meth:`Client.terminate_server`, or by SIGTERM.

    Raises ``FastgenError`` with the server's own message where it cannot start.
    """
    need_extra()
    check_names(arguments)
    if protocol == "grpc" and arguments.get("grpc_port") is None:
        raise InvalidArgumentError("protocol='grpc' needs a grpc_port; 0 takes any that is free")
    try:
        text = json.dumps({"model": str(model), **arguments}, default=_plain)
    except TypeError as error:
        raise InvalidArgumentError(f"an argument cannot be handed to another process: {error}") from None
    deployment = _start(text, Path(model).name)
    return Client(lambda: connect(deployment, api_key=api_key, protocol=protocol))


show_arguments(serve, LoadOptions, ServeOptions)


def _plain(value: object) -> Any:
    """Returns the JSON form of ``value``."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Policy):
        return {"name": policy_name(value), **{name: getattr(value, name) for name in value.parameters}}
    raise TypeError(f"{value!r:.60}")


def _start(request: str, title: str) -> Deployment:
    """Starts the process and waits until it is ready."""
    descriptor, log = tempfile.mkstemp(prefix=f"{title}-", suffix=".log", dir=make_deployments_directory())
    reading, writing = os.pipe()
    with os.fdopen(descriptor, "wb") as out, os.fdopen(reading) as answer:
        process = subprocess.Popen(
            [sys.executable, "-m", "fastgen.serving.detached", str(writing)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=None if sys.stderr is not None and sys.stderr.isatty() else out,
            env={**os.environ, LOG_VARIABLE: log},
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as stdin:  # it may have ended; its status says more
                stdin.write(request.encode())
            outcome = json.loads(answer.readline() or "{}")
        except BaseException:  # Ctrl-C: no client would know the server
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    if "deployment" in outcome:
        return Deployment(**outcome["deployment"])
    status = process.wait()
    if "error" in outcome:
        Path(log).unlink()
        raise FastgenError(outcome["error"])
    raise FastgenError(f"the server ended with status {status} before it was ready; its output is in {log}")


def _main() -> None:
    from fastgen.serving.run import run

    pipe = int(sys.argv[1])
    os.set_inheritable(pipe, False)
    request = json.load(sys.stdin)
    is_ready = False

    def report(outcome: Mapping[str, Any]) -> None:
        with os.fdopen(pipe, "w") as out:
            json.dump(outcome, out)

    def ready(deployment: Deployment) -> None:
        nonlocal is_ready
        is_ready = True
        move_output_to_log()
        report({"deployment": asdict(deployment)})

    try:
        load_arguments, options = sort_arguments(request)
        if options.replicas is None:
            run(load_arguments, options, on_ready=ready)
        else:
            from fastgen.serving.replicas.launch import run_replicas

            run_replicas(request, on_ready=ready)
    except FastgenError as error:
        if is_ready:  # the pipe is closed, and its number may be that of another file
            print(f"fastgen: {error}", file=sys.stderr)
        else:
            report({"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    _main()
