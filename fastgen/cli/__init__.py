"""The ``fastgen`` command. Heavy imports are inside the commands, so that help and usage errors are fast."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import fastgen
from fastgen.cli.bench import app as bench_app
from fastgen.cli.bench_paper import paper
from fastgen.cli.bench_report import report
from fastgen.cli.calibrate import calibrate
from fastgen.cli.chat import chat
from fastgen.cli.command import App
from fastgen.cli.flight import replay, timeline, why
from fastgen.cli.generate import generate
from fastgen.cli.info import info
from fastgen.cli.kernels import app as kernels_app
from fastgen.cli.options import in_flags
from fastgen.cli.plan import plan
from fastgen.cli.recipe import app as recipe_app
from fastgen.cli.recipe_new import new
from fastgen.cli.recipe_reading import diff, explain
from fastgen.cli.serve import serve
from fastgen.cli.verify import verify
from fastgen.errors import FastgenError
from fastgen.serving.output import open_closed_streams

app = App(name="fastgen", pretty_exceptions_enable=False)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(info)
app.command()(calibrate)
app.command(short_help="Prove a recipe, or name its first node that disagrees.")(verify)
app.command()(why)
app.command()(replay)
app.command()(timeline)
app.command(short_help="Show how many requests devices carry, and how fast.")(plan)
recipe_app.command()(new)
recipe_app.command()(diff)
recipe_app.command()(explain)
bench_app.command()(report)
bench_app.command()(paper)
app.add_typer(bench_app, name="bench", short_help="Measure an engine or a server, and search for the load it carries.")
app.add_typer(recipe_app, name="recipe", short_help="List and show recipes, and what they make of a model.")
app.add_typer(kernels_app, name="kernels", short_help="List, show, build and measure a model's generated kernels.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastgen {fastgen.__version__}")
        raise typer.Exit


@app.callback()
def _fastgen(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Text generation from declarative model recipes."""


@cache
def _command() -> typer.core.TyperGroup:
    """Returns the application's command, which takes some 60 ms to make."""
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    return command


_PACKAGE = Path(fastgen.__file__).parent
_format_others_warning = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Returns a warning of fastgen as a sentence, without the code that it comes from."""
    if Path(filename).is_relative_to(_PACKAGE):
        return f"fastgen: warning: {message}\n"
    return _format_others_warning(message, category, filename, lineno, line)


def main() -> None:
    """Runs the command line. The exit status is 1, with one message, for an error of fastgen, and 2 for wrong usage."""
    open_closed_streams()
    if sys.stderr is None:  # closed; as print's file, None would mean stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process)
    if sys.stdout is None:
        if sys.argv[1:2] != ["serve"]:  # a server has more to give than what it prints
            _fail("standard output is closed")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?" instead
    warnings.formatwarning = _format_warning
    try:
        try:
            _command()(prog_name="fastgen")
        finally:
            sys.stdout.flush()  # here, where a failure can still be reported
    except FastgenError as error:
        _fail(in_flags(error))
    except OSError as error:
        if error.filename is not None:  # not about a stream, so a bug of fastgen
            raise
        _discard_output()
        _fail(None if isinstance(error, BrokenPipeError) else f"standard input or output fails: {error.strerror}")


def _fail(message: str | None) -> NoReturn:
    if message is not None:
        with contextlib.suppress(OSError):
            print(f"fastgen: {message}", file=sys.stderr)
    sys.exit(1)


def _discard_output() -> None:
    """Discards the buffer of a broken stdout, which Python would otherwise try to write at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
