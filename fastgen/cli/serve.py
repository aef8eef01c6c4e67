"""``fastgen serve``: serves a model by HTTP and gRPC until it is stopped."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fastgen.cli import options


@options.with_flags(serving=options.SERVE_ARGUMENTS, load=options.LOAD_ARGUMENTS)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=options.MODEL_HELP),
    ] = None,
    properties: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Translate a serving.properties of LMI; flags beside it win."),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the servers on this machine and exit.")] = False,
    stop: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="End the server with this name, model or address on this machine."),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="With --replicas: write the file for Ray's `serve deploy`, and exit."),
    ] = False,
    *,
    serving: options.Given,
    load: options.Given,
) -> None:
    """Serve MODEL to OpenAI's clients, by gRPC and to fastgen.client, until Ctrl-C or SIGTERM."""
    from fastgen.serving.extra import need_extra

    need_extra()
    if list_all:
        _list()
    elif stop is not None:
        _stop(stop)
    else:
        given = _arguments(model, properties, serving | load)
        if print_config:
            _print_config(given)
        else:
            _serve(given)


def _arguments(model: str | None, properties: str | None, given: options.Given) -> options.Given:
    if model is not None:
        given = given | {"model": model}
    if properties is not None:
        given = _translated(Path(properties)) | given
    if "model" not in given:
        options.usage_error(f"MODEL is missing. {options.MODEL_HELP}")
    return given


def _print_config(given: options.Given) -> None:
    from fastgen.serving.replicas.deploy_file import deploy_file

    print(deploy_file(given), end="")


def _serve(given: options.Given) -> None:
    from fastgen.serving.arguments import sort_arguments
    from fastgen.serving.run import run

    load_arguments, serve_options = sort_arguments(given)
    if serve_options.replicas is None:
        run(load_arguments, serve_options)
    else:
        from fastgen.serving.replicas.launch import run_replicas

        run_replicas(given)


def _translated(file: Path) -> dict[str, Any]:
    """Returns the arguments that ``file`` and the environment stand for, and prints what became of each key."""
    from fastgen.serving.lmi.translate import translate

    translation = translate(file, os.environ)
    for note in translation.notes:
        with contextlib.suppress(OSError):  # a full disk is no reason not to serve
            print(note, file=sys.stderr)
    return translation.arguments


def _list() -> None:
    from fastgen.serving.clients.deployments import deployments

    for one in deployments():
        by_grpc = "" if one.grpc_address is None else f"  gRPC {one.grpc_address}"
        print(f"{one.name}  {one.address}{by_grpc}  process {one.pid}")


def _stop(name: str) -> None:
    from fastgen.serving.clients.connect import client, is_address
    from fastgen.serving.clients.deployments import find_deployment

    if not is_address(name):
        find_deployment(name, advice="`fastgen serve --list` lists the servers that run")
    client(name).terminate_server()
