"""``fastgen bench report``: one HTML file, pictures and a table from a directory of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIRECTORY",
            help="A directory with runs of fastgen bench, flight recordings, and results of vllm bench or guidellm.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The HTML file.", show_default="DIRECTORY/report.html")
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="Title of the report.")] = "fastgen bench",
) -> None:
    """Write the report of a directory of runs: an HTML file, its pictures as PNG beside it, and a table.

    The HTML file holds its pictures and needs no network.
    """
    from fastgen.lab.report.html import write_report
    from fastgen.lab.report.results import read_directory
    from fastgen.lab.report.table import print_table

    found = read_directory(directory)
    for file in write_report(found, out or directory / "report.html", title=title):
        print(f"report: {file}", file=sys.stderr)
    if found.results:
        print_table(found.results)
    for name, reason in found.unread.items():
        print(f"fastgen: {name} could not be read: {reason}", file=sys.stderr)
