"""``fastgen recipe new``: proposes a recipe for a checkpoint from its configuration and its headers."""

from __future__ import annotations

import json
import os
import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastgen.errors import InvalidArgumentError

if TYPE_CHECKING:
    from fastgen.recipe_tools.propose.propose import Proposal
    from fastgen.recipe_tools.propose.remote import Headers

_LISTED = 24  # modules of each side that the terminal shows


def new(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A directory, a built-in model, or a hub id: owner/name.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write. Default: NAME.yaml in this directory."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Propose a recipe for a checkpoint. Reads its config.json and the headers of its tensors, but no weights."""
    from fastgen.models.registry.registry import list_recipes
    from fastgen.recipe_tools.propose.propose import propose

    if output is not None:
        _may_write(output, force)
    (config, shapes), place = _headers(checkpoint)
    known = [each.recipe for each in list_recipes()]
    proposal = propose(config, shapes, known)
    own = next((each.name for each in known if set(each.architectures) & set(proposal.recipe.architectures)), None)
    file = output or Path(f"{proposal.recipe.name}.yaml")
    _may_write(file, force)
    try:
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(proposal.text)
    except OSError as error:
        raise InvalidArgumentError(f"{file}: cannot be written: {error.strerror or error}") from None
    if as_json:
        print(json.dumps({"own": own} | _facts(proposal, file)))
    else:
        if own is not None:
            print(f"the recipe {own} is for this architecture already: without --recipe the checkpoint is read by that")
        _print(proposal, file, place)


def _headers(checkpoint: str) -> tuple[Headers, str]:
    """Returns the headers of a directory, a built-in or a hub id, and the name of its directory in a command."""
    from fastgen.models.checkpoint.builtins import BUILTINS
    from fastgen.models.checkpoint.checkpoint import Checkpoint
    from fastgen.models.checkpoint.hub import locate
    from fastgen.recipe_tools.propose.remote import read_remote

    if not os.path.exists(os.path.expanduser(checkpoint)) and checkpoint not in BUILTINS:
        return read_remote(checkpoint), checkpoint
    opened = Checkpoint.open(locate(checkpoint))
    shapes = {name: header.shape for name, header in opened.tensors.items()}
    return (opened.config, shapes), str(opened.directory)


def _may_write(file: Path, force: bool) -> None:
    if file.is_dir():
        raise InvalidArgumentError(f"{file}: is a directory; name a file with --output")
    if not force and os.path.lexists(file):
        raise InvalidArgumentError(f"{file}: exists; pass --force to overwrite it, or another --output")


def _facts(proposal: Proposal, file: Path) -> dict[str, Any]:
    nearest = proposal.nearest
    return {
        "file": str(file),
        "name": proposal.recipe.name,
        "extends": proposal.recipe.extends,
        "text": proposal.text,
        "nearest": nearest
        and {
            "name": nearest.recipe.name,
            "explained_tensors": nearest.explained,
            "num_tensors": nearest.num_tensors,
        },
        "only_in_checkpoint": _grouped(proposal.only_here),
        "only_in_nearest": _grouped(proposal.only_nearest),
        "questions": [{"node": each.path, "line": each.line, "question": each.text} for each in proposal.questions],
        "unclaimed_tensors": list(proposal.unclaimed),
        "missing_tensors": list(proposal.missing),
        "unread_keys": list(proposal.unread),
    }


def _print(proposal: Proposal, file: Path, checkpoint: str) -> None:
    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    nearest = proposal.nearest
    if nearest is None or not nearest.explained:
        console.print("no known recipe explains any of the tensors")
    else:
        share = f"{nearest.explained:,} of {nearest.num_tensors:,} tensors by shape and place"
        console.print(f"nearest recipe: {nearest.recipe.name}, which explains {share}")
        if proposal.recipe.extends not in (None, nearest.recipe.name):
            console.print(f"the proposal is shortest as a variant of {proposal.recipe.extends}, so it extends that")
    for title, names in (("here only", proposal.only_here), ("there only", proposal.only_nearest)):
        groups = _grouped(names) if nearest is not None and nearest.explained else {}
        if groups:
            console.print(f"\n{title}:")
        for module, lasts in list(groups.items())[:_LISTED]:
            console.print(f"  {module}: {', '.join(lasts)}")
        if len(groups) > _LISTED:
            console.print(f"  and {len(groups) - _LISTED} modules more")
    if proposal.questions:
        console.print(f"\nwhat headers do not show ({len(proposal.questions)}):")
    for each in proposal.questions:
        console.print(f"  {file}:{each.line}: {each.path or 'tensors'}: {each.text}")
    if proposal.unread:
        console.print(f"\nread by nothing, so the checkpoint cannot be loaded yet: {', '.join(proposal.unread)}")
    for title, names in (
        ("claimed by no node, so the checkpoint cannot be loaded yet", proposal.unclaimed),
        ("needed but missing, so the checkpoint cannot be loaded yet", proposal.missing),
    ):
        if names:
            console.print(f"\n{title}:")
        for module, lasts in list(_grouped(names).items())[:_LISTED]:
            console.print(f"  {module}: {', '.join(lasts)}")
    command = f"fastgen verify {_word(checkpoint)} --recipe {_word(file)}"
    if _transformers_knows(proposal.recipe.architectures):
        command += " --this-config"
    else:
        console.print("\ntransformers does not know this architecture: have at hand a Python file with a function that")
        console.print("takes the directory and makes a torch module whose submodules are named as in the checkpoint")
        command += " --reference FILE.py:FUNCTION"
    task = "Answer the questions there, then" if proposal.questions else "Read it, then"
    console.print(f"\nwrote {file}. {task} run: {command}")


def _transformers_knows(architectures: Sequence[str]) -> bool:
    """Returns whether verification can build models of one of them by itself."""
    import transformers

    return any(hasattr(transformers, name) for name in architectures)


def _word(path: Path | str) -> str:
    return shlex.quote(str(path))


def _grouped(names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the last parts of the tensors' names by their module, layers and experts folded."""
    from fastgen.models.registry.nearest import fold

    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted({fold(name) for name in names}):
        module, _, last = name.rpartition(".")
        groups[module].append(last)
    return dict(groups)
