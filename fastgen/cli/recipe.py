"""``fastgen recipe``: lists and shows recipes, and the model that a recipe makes of a ``config.json``.

Needs neither torch nor weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fastgen.cli import options
from fastgen.cli.command import App

app = App(help="List and show recipes, and the models that they make of a configuration.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_TITLES = ("", "", "norm", "parts", "output norm", "norm of the sum", "parameters")
_LEAST_PARTS_WIDTH = 24  # columns of a terminal; in fewer a sentence is hard to read


@app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """List the recipes that have a name, and the architectures they are for."""
    from fastgen.models.registry.registry import list_recipes

    listed: list[dict[str, Any]] = [
        {
            "name": each.recipe.name,
            "architectures": list(each.recipe.architectures),
            "origin": each.origin,
            "file": str(each.recipe.file),
        }
        for each in list_recipes()
    ]
    if as_json:
        print(json.dumps(listed))
        return
    table = Table("recipe", "architectures", "from", box=None, pad_edge=False, header_style="bold")
    for row in listed:
        table.add_row(row["name"], ", ".join(row["architectures"]), row["origin"])
    _console().print(table)


@app.command("show")
@options.with_flags(accepted=options.only(options.LOAD_ARGUMENTS, "allow_config_keys"))
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe's name, or its file.")],
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A config.json, or the directory that holds one.")
    ] = None,
    as_json: AsJson = False,
    *,
    accepted: options.Given,
) -> None:
    """Print a recipe; with --config, the model that it makes of that configuration, with every number known."""
    from fastgen.cli.recipe_facts import facts_of
    from fastgen.models.checkpoint.files import read_json_object
    from fastgen.models.registry.registry import named_recipe
    from fastgen.models.resolve.resolve import resolve

    recipe = named_recipe(name)
    if config is None:
        whole = {"name": recipe.name, "file": str(recipe.file), "text": recipe.text, "resolved": recipe.tree.plain()}
        print(json.dumps(whole) if as_json else recipe.text, end="\n" if as_json else "")
        return
    file = config / "config.json" if config.is_dir() else config
    content = read_json_object(file)
    spec = resolve(recipe, content, config_file=str(file), **accepted)
    facts = facts_of(spec, content)
    if as_json:
        stored = {
            each.names: each.stored_shape for each in spec.tensors()
        }  # a tensor that parameters share is there once
        print(json.dumps(facts | {"tensors": [{"names": names, "shape": shape} for names, shape in stored.items()]}))
    else:
        _print_facts(facts)


@app.command("schema")
def schema_command(as_json: AsJson = False) -> None:
    """Print the JSON Schema of recipe files, with which editors complete and check them."""
    from fastgen.models.recipe.schema import json_schema

    print(json.dumps(json_schema(), indent=None if as_json else 2))


def _console() -> Console:
    console = Console(highlight=False, emoji=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, emoji=False, markup=False, width=160)


def _print_facts(facts: dict[str, Any]) -> None:
    console = _console()
    limit = facts["max_positions"]
    rows = {
        "recipe": f"{facts['recipe']}, for {facts['architecture']}",
        "parameters": f"{facts['num_parameters']:,}",
        "KV cache": f"{facts['kv_bytes_per_token']:,} bytes a token ({facts['dtype']})",
        "FLOPs a token": ", ".join(
            f"{flops:,} with {int(context):,} in context" for context, flops in facts["flops_per_token"].items()
        ),
        "positions": "no limit" if limit is None else f"{limit:,}",
        "hidden size": f"{facts['hidden_size']:,}",
        "vocabulary": f"{facts['vocab_size']:,}",
    }
    table = Table.grid(padding=(0, 2))
    for title, text in rows.items():
        table.add_row(title, text)
    console.print(table)
    console.print()
    _print_model(console, _model_rows(facts))


def _model_rows(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the rows of the model from end to end, a cell for each of :data:`_TITLES`."""
    embedding, head = facts["embedding"], facts["head"]
    rows = [("embedding", "", "", embedding["is"], "", "", f"{embedding['num_parameters']:,}")]
    for group in facts["layers"]:
        title = f"layers {group['indices']}" if group["count"] > 1 else f"layer {group['indices']}"
        for branch in group["branches"]:
            parameters = f"{branch['num_parameters']:,}" + (f" × {group['count']}" if group["count"] > 1 else "")
            first, *others = branch["parts"]
            rows.append(
                (title, branch["name"], branch["norm"], first, branch["output_norm"], branch["sum_norm"], parameters)
            )
            rows += [("", "", "", other, "", "", "") for other in others]
            title = ""
    if facts["final_norm"]:
        rows.append(("final norm", "", facts["final_norm"], "", "", "", ""))
    return [*rows, ("head", "", "", head["is"], "", "", f"{head['num_parameters']:,}")]


def _print_model(console: Console, rows: list[tuple[str, ...]]) -> None:
    """Prints a table whose column of parts wraps, or where the other columns leave it no room, a line for each cell."""
    columns = [(title, cells) for title, cells in zip(_TITLES, zip(*rows, strict=True), strict=True) if any(cells)]
    taken = sum(2 + max(map(len, (title, *cells))) for title, cells in columns if title != "parts")
    if taken + _LEAST_PARTS_WIDTH <= console.width:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title, _ in columns:
            table.add_column(title, no_wrap=title != "parts", justify="right" if title == "parameters" else "left")
        for row in zip(*(cells for _, cells in columns), strict=True):
            table.add_row(*row)
        console.print(table)
        return
    for place, branch, *cells in rows:
        if place or branch:
            console.print(f"{place} {branch}".strip(), style="bold")
        lines = Table.grid(padding=(0, 2))
        for title, cell in zip(_TITLES[2:], cells, strict=True):
            if cell:
                lines.add_row(f"  {title}", cell)
        console.print(lines)
