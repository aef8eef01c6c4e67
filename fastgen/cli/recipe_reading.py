"""``fastgen recipe diff`` and ``fastgen recipe explain``: compare recipes and describe them in words.

Needs neither torch nor weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fastgen.cli import options
from fastgen.errors import FastgenError, InvalidArgumentError

if TYPE_CHECKING:
    from fastgen.models.recipe.recipe import Recipe
    from fastgen.recipe_tools.diff.diff import Difference
    from fastgen.recipe_tools.diff.lines import Line
    from fastgen.recipe_tools.diff.specs import SpecDifference
    from fastgen.recipe_tools.explain.drawing import Scene

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A config.json, or the directory that holds one.")
]

_STYLES = {"-": "red", "+": "green", "title": "bold", "label": "dim", "text": None, None: "cyan"}


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A recipe's name, or its file.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another's.")],
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show how recipe B differs from recipe A, with the recipes that they extend merged in.

    With --config: how the models differ that they make of that configuration.

    The exit status is 0 if nothing differs, 1 if something does, 2 if they could not be compared.
    """
    from fastgen.models.registry.registry import named_recipe
    from fastgen.recipe_tools.diff.lines import lines_of

    try:
        recipes = named_recipe(a), named_recipe(b)
        found = _differences(*recipes, config)
    except FastgenError as error:
        print(f"fastgen: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        sides = {
            side: {"name": recipe.name, "file": str(recipe.file)} for side, recipe in zip("ab", recipes, strict=True)
        }
        print(json.dumps({**sides, "differences": [each.as_json() for each in found]}))
    elif not found:
        print("no difference")
    else:
        _print_lines(lines_of(*recipes, found))
    raise typer.Exit(1 if found else 0)


@options.with_flags(accepted=options.only(options.LOAD_ARGUMENTS, "allow_config_keys"))
def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe's name, or its file.")],
    config: Config = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the drawing as a picture.")] = None,
    as_json: AsJson = False,
    *,
    accepted: options.Given,
) -> None:
    """Draw the model that a recipe describes, and explain it in sentences.

    With --config: the model that it makes of that configuration, conditions and expressions resolved.
    """
    from fastgen.models.registry.registry import named_recipe
    from fastgen.recipe_tools.explain.drawing import MAX_WIDTH, draw
    from fastgen.recipe_tools.explain.explain import explain as explanation_of
    from fastgen.recipe_tools.explain.plain_text import from_here
    from fastgen.recipe_tools.explain.svg import as_svg
    from fastgen.recipe_tools.explain.wrap import wrapped

    recipe = named_recipe(name)
    content, file = (None, "") if config is None else _read_config(config)
    explanation = explanation_of(recipe, content, config_file=file, **accepted)
    if svg is not None:
        try:
            svg.write_text(as_svg(draw(explanation, MAX_WIDTH)), encoding="utf-8")
        except OSError as error:
            raise InvalidArgumentError(f"--svg {svg}: cannot be written: {error.strerror or error}") from None
    if as_json:
        print(json.dumps(explanation.as_json()))
        return
    console = _console()
    scene = draw(explanation, min(console.width, MAX_WIDTH))
    for line in wrapped(f"{scene.title} ({from_here(recipe.file)})", scene.width):
        console.print(Text(line, "bold"))
    for sentence in explanation.sentences:
        console.print()
        console.print(*wrapped(sentence, scene.width), sep="\n")
    console.print()
    for text in _rows(scene):
        console.print(text)


def _differences(a: Recipe, b: Recipe, config: Path | None) -> Sequence[Difference | SpecDifference]:
    from fastgen.recipe_tools.diff.diff import recipe_differences
    from fastgen.recipe_tools.diff.specs import spec_differences

    if config is None:
        return recipe_differences(a, b)
    content, file = _read_config(config)
    return spec_differences(a, b, content, config_file=file)


def _read_config(config: Path) -> tuple[Mapping[str, Any], str]:
    from fastgen.models.checkpoint.files import read_json_object

    file = config / "config.json" if config.is_dir() else config
    return read_json_object(file), str(file)


def _console() -> Console:
    """Returns a console that prints lines as they are, without wrapping them."""
    from fastgen.recipe_tools.explain.drawing import DEFAULT_WIDTH

    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = DEFAULT_WIDTH
    return console


def _print_lines(lines: Iterator[Line]) -> None:
    console = _console()
    for line in lines:
        console.print(Text(line.text, _STYLES[line.style] or ""))


def _rows(scene: Scene) -> Iterator[Text]:
    from fastgen.recipe_tools.explain.text import cells

    for row in cells(scene):
        text = Text()
        for character, style in row:
            text.append(character, _STYLES[style])
        text.rstrip()
        yield text
