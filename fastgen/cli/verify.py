"""``fastgen verify``: checks that a recipe computes what the architecture computes, and finds the wrong line."""

from __future__ import annotations

import json
import sys
import traceback
from enum import Enum, auto
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fastgen.cli import options
from fastgen.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch import nn

    from fastgen.verify import Finding, Report

_TITLES = {
    "numbers": "resolved numbers",
    "weights": "weight map: every tensor claimed once",
    "nodes": "recipe nodes, inputs and outputs",
    "log-probabilities": "final log-probabilities",
    "alone": "engine: each prompt alone",
    "whole": "engine: prompts together, ragged",
    "chunked": "engine: prompts in chunks, every captured size",
    "kernels": "engine: by generated kernels",
}


@options.with_flags(named=options.only(options.LOAD_ARGUMENTS, "recipe"))
def verify(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe's name or file, or a model: its recipe is tested.")
    ],
    named: options.Given,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION|FILE",
            help="Reference for MODEL: a function that takes its directory and makes a torch module (the file is run), "
            "or recorded activations (safetensors).",
        ),
    ] = None,
    this_config: Annotated[
        bool,
        typer.Option(
            "--this-config",
            help="Test MODEL's own configuration, shrunk where it is large, and the names and shapes of its tensors. "
            "Without this option configurations of the whole family are drawn.",
        ),
    ] = False,
    configs: Annotated[int, typer.Option(min=1, help="Number of tiny configurations to draw.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed that they are drawn from.")] = 0,
    device: Annotated[
        str, typer.Option(help="Where generated kernels run: cpu, or a GPU (cuda, cuda:1). All else runs on the CPU.")
    ] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a recipe with a reference; name the first node that disagrees. Exit status 1 where one does."""
    from fastgen.verify import verify as run

    given = None if reference is None else _reference(reference, target)
    errors = Console(stderr=True, highlight=False)
    with errors.status("drawing configurations") as status:
        report = run(
            target,
            recipe=named.get("recipe"),
            reference=given,
            this_config=this_config,
            configs=configs,
            seed=seed,
            device=device,
            progress=status.update,
        )
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        _print(report, _Of.reference if given is not None else _Of.this_config if this_config else _Of.family)
        if not report.passed and given is None and not this_config and Path(target).is_dir():
            print("  with --this-config only what this checkpoint states is tested")
    if not report.passed:
        sys.exit(1)


def _reference(text: str, target: str) -> nn.Module | Path:
    """Returns what ``--reference`` names: a file, or the module that a function makes of the ``target``'s directory."""
    path, _, function = text.rpartition(":")
    is_function = path.endswith(".py")
    file = Path(path if is_function else text)
    problem = None
    if Path(target).suffix in (".yaml", ".yml"):
        problem = "a reference belongs to weights; name the model's directory, and the recipe with --recipe"
    elif not file.is_file():
        problem = f"there is no file {file}"
    elif file.suffix == ".py" and not (is_function and function):
        problem = f"name the function that makes the module, as in {file}:load"
    if problem is not None:
        raise InvalidArgumentError(f"--reference {text}: {problem}")
    return _made_by(file, function, target) if is_function else file


def _made_by(file: Path, function: str, target: str) -> nn.Module:
    """Runs the Python ``file``, and returns the module that its ``function`` makes of the directory of ``target``."""
    from torch import nn

    from fastgen.models.checkpoint.hub import locate
    from fastgen.models.recipe.spelling import quoted

    def error(problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"--reference {file}:{function}: {problem}")

    directory = locate(target)
    sys.path.insert(
        0, str(file.parent.resolve())
    )  # where `python FILE` would look for the modules that the file imports
    try:
        make = getattr(_imported(file), function, None)
        if not callable(make):
            raise error(f"{file} has no function {quoted(function)!r}")
        module = make(str(directory))
    except InvalidArgumentError:
        raise
    except (Exception, SystemExit) as failure:  # the file may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(failure.__traceback__) if frame.filename == str(file)]
        where = f" in line {lines[-1]}" if lines else ""
        raise error(f"it fails{where}: {type(failure).__name__}: {failure}") from failure
    finally:
        sys.path.pop(0)
    if not isinstance(module, nn.Module):
        raise error(f"it must return a torch.nn.Module, not {type(module).__name__}")
    return module


def _imported(file: Path) -> ModuleType:
    spec = spec_from_file_location(f"fastgen_reference_{file.stem}", file)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # its classes look for their module there
    spec.loader.exec_module(module)
    return module


class _Of(Enum):
    """Holds the facts of a verification."""

    family = auto()  # drawn configurations
    this_config = auto()  # the checkpoint's own configuration
    reference = auto()  # the checkpoint with the reference that was given


def _print(report: Report, of: _Of) -> None:
    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    table = Table("", "check", "compared", "largest difference", box=None, pad_edge=False, header_style="bold")
    for name, title in _TITLES.items():
        result = report.checks.get(name)
        if result is None:
            table.add_row("·", title, "not reached" if not report.passed else "-", "")
        else:
            mark = "✗" if result.num_failed else "✓"
            shown = f"{result.largest:.1e}" if result.largest else ""
            table.add_row(mark, title, str(result.num_compared), shown)
    console.print(table)
    console.print()
    if report.finding is None:
        console.print(f"✓ {report.recipe} agrees with its reference{_on(report, of)}")
    else:
        _print_finding(console, report, report.finding, of)


def _on(report: Report, of: _Of) -> str:
    """Returns the text that says on which configurations a recipe agrees."""
    match of:
        case _Of.family:
            return f": {len(report.configs)} configurations, seed {report.seed}, {report.seconds:.0f} s"
        case _Of.this_config:
            smaller = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in report.shrunk.items())
            return f" on this checkpoint's configuration, {f'shrunk: {smaller}' if smaller else 'as it is'}"
    return ""


def _print_finding(console: Console, report: Report, finding: Finding, of: _Of) -> None:
    from fastgen.models.resolve.config_keys import INERT

    where = f"{finding.node}" if finding.node else f"{report.recipe} (no single node)"
    console.print(f"✗ {where}")
    console.print(f"  {options.in_flags(finding.message)}")
    if finding.cause is not None:
        console.print(f"  likely cause: {finding.cause.change}")
        agrees = (
            "the whole configuration agrees" if finding.cause.complete else "this node agrees, but a later one does not"
        )
        if finding.cause.unread:
            agrees = f"all nodes agree; what remains is that {finding.cause.unread}"
        console.print(f"  tried out: with that change {agrees}")
    elif finding.node is not None:
        console.print("  no single change that is often the cause makes it agree; compare this node with the reference")
    else:
        console.print("  the recipe agrees node by node, so this is a bug of fastgen: please report it")
    stated = report.configs[finding.config] if finding.config < len(report.configs) else {}
    shown = json.dumps({key: value for key, value in stated.items() if key not in INERT})
    if of is _Of.family:
        console.print(f"  configuration {finding.config} of seed {report.seed}, drawn by verify: {shown}")
    elif of is _Of.this_config and finding.config == 0 and report.shrunk:
        console.print(f"  this checkpoint's configuration, shrunk: {shown}")
