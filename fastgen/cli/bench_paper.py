"""``fastgen bench paper``: repeats published measurements."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def paper(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="insights, llama2, replicas, falcon, chats or policies.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model that insights and policies measure here: a checkpoint directory or a built-in.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON file for the figures.", show_default=False)
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="A directory for the pictures.", show_default=False)
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Run a small part, to see that it works.")] = False,
) -> None:
    """Repeat a measurement of the FastGen paper or of a post, and print it beside the published figures.

    llama2, replicas, falcon and chats run the scheduler on simulated devices. insights and policies measure a model on
    this machine.
    """
    from fastgen.lab.paper.registry import reproduction
    from fastgen.lab.paper.reproduction import Setting, write_pictures, write_result

    found = reproduction(name)
    result = found.run(Setting(small=small, model=model))
    if out is not None:
        write_result(found, result, out)
    print(f"## {found.title}\n\n{found.section(result)}")
    if pictures is not None:
        for file in write_pictures(found, result, pictures):
            print(f"picture: {file}", file=sys.stderr)
