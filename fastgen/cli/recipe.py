"""``fastgen recipe``: lists and shows recipes, and the model that a recipe makes of a ``config.json``.

Needs neither torch nor weights.
"""

from __future__ import annotations

import json
import math
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fastgen.cli import options
from fastgen.cli.command import App
from fastgen.models.checkpoint.files import read_json_object
from fastgen.models.recipe.schema import json_schema
from fastgen.models.registry.registry import list_recipes, named_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import (
    AttentionSpec,
    BranchSpec,
    LatentAttentionSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PartSpec,
    RotarySpec,
    TensorSpec,
    tensors_of,
)

app = App(help="List and show recipes, and the models that they make of a configuration.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_TITLES = ("", "", "norm", "parts", "output norm", "norm of the sum", "parameters")
_LEAST_PARTS_WIDTH = 24  # columns of a terminal; in fewer a sentence is hard to read
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """List the recipes that have a name, and the architectures they are for."""
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
    recipe = named_recipe(name)
    if config is None:
        whole = {"name": recipe.name, "file": str(recipe.file), "text": recipe.text, "resolved": recipe.tree.plain()}
        print(json.dumps(whole) if as_json else recipe.text, end="\n" if as_json else "")
        return
    file = config / "config.json" if config.is_dir() else config
    content = read_json_object(file)
    spec = resolve(recipe, content, config_file=str(file), **accepted)
    facts = _facts(spec, content)
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
    print(json.dumps(json_schema(), indent=None if as_json else 2))


def _console() -> Console:
    console = Console(highlight=False, emoji=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, emoji=False, markup=False, width=160)


def _facts(spec: ModelSpec, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts about a resolved model, as JSON."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = dtype if dtype in _DTYPE_BYTES else "bfloat16"
    contexts = sorted({1, min(1024, spec.max_positions or 1024), spec.max_positions or 1024})
    return {
        "recipe": spec.recipe,
        "architecture": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_positions": spec.max_positions,
        "tied": spec.tied,
        "num_parameters": spec.num_parameters,
        "dtype": dtype,
        "kv_bytes_per_token": spec.kv_bytes_per_token(_DTYPE_BYTES[dtype]),
        "flops_per_token": {str(context): spec.flops_per_token(context) for context in contexts},
        "embedding": _embedding(spec),
        "layers": _layers(spec),
        "final_norm": _norm(spec.final_norm),
        "head": _head(spec),
    }


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


def _embedding(spec: ModelSpec) -> dict[str, Any]:
    embedding = spec.embedding
    vocab_size, width = embedding.tokens.shape
    parts = [f"{vocab_size:,} × {width}"]
    if embedding.scale != 1:
        parts.append(f"times {embedding.scale:g}")
    if embedding.project:
        parts.append(f"projected to {embedding.project.out_features}")
    if embedding.positions:
        rows = embedding.positions.weight.shape[0]
        parts.append(f"learned positions, {rows:,} rows from {embedding.positions.offset} on")
    if embedding.norm:
        parts.append(f"{_norm(embedding.norm)} norm")
    return {"is": ", ".join(parts), "num_parameters": _count(embedding)}


def _head(spec: ModelSpec) -> dict[str, Any]:
    parts = [f"projected to {spec.head.project.out_features}"] if spec.head.project else []
    parts.append("the token embedding" if spec.head.weight is None else "{:,} × {}".format(*spec.head.weight.shape))
    if spec.head.bias:
        parts.append("bias")
    if spec.head.scale != 1:
        parts.append(f"times {spec.head.scale:g}")
    if spec.head.softcap is not None:
        parts.append(f"capped at {spec.head.softcap:g}")
    return {"is": ", ".join(parts), "num_parameters": _count(spec.head)}


def _layers(spec: ModelSpec) -> list[dict[str, Any]]:
    """Returns the runs of layers that are alike in all but their index."""
    described = [(layer.index, [_branch(branch) for branch in layer.branches]) for layer in spec.layers]
    groups = []
    for branches, run in groupby(described, key=lambda each: each[1]):
        indices = [index for index, _ in run]
        text = str(indices[0]) if len(indices) == 1 else f"{indices[0]}–{indices[-1]}"
        groups.append({"indices": text, "count": len(indices), "branches": branches})
    return groups


def _branch(branch: BranchSpec) -> dict[str, Any]:
    return {
        "name": branch.name,
        "norm": _norm(branch.norm),
        "parts": [_part(part) for part in branch.parts],
        "output_norm": _norm(branch.output_norm),
        "scale": branch.scale,
        "sum_norm": _norm(branch.sum_norm),
        "num_parameters": _count(branch),
    }


def _part(part: PartSpec) -> str:
    own = f"norm {_norm(part.norm)}, then " if part.norm else ""
    match part.part:
        case AttentionSpec():
            return own + _attention(part.part)
        case LatentAttentionSpec():
            return own + _latent_attention(part.part)
        case MlpSpec():
            return own + _mlp(part.part)
        case MoeSpec():
            return own + _moe(part.part)


def _attention(part: AttentionSpec) -> str:
    words = [f"attention: {part.num_heads} heads, {part.num_kv_heads} of K and V, {part.head_dim} wide"]
    if part.q_norm or part.k_norm:
        norm = part.q_norm or part.k_norm
        assert norm is not None
        words.append(f"{_norm(norm.norm)} norm of {'each head' if norm.over == 'head' else 'all heads'}")
    if part.rotary:
        words.append(_rotary(part.rotary, part.head_dim))
    if part.alibi:
        words.append("ALiBi")
    if part.scale != part.head_dim**-0.5:
        words.append(f"scale {part.scale:g}")
    if part.softcap is not None:
        words.append(f"capped at {part.softcap:g}")
    if part.sliding_window is not None:
        words.append(f"window {part.sliding_window:,}")
    return ", ".join(words + _biases({"q, k, v": part.q.bias, "output": part.output.bias}))


def _latent_attention(part: LatentAttentionSpec) -> str:
    words = [
        f"latent attention: {part.num_heads} heads, {part.nope_dim} + {part.rope_dim} wide, values {part.v_head_dim}",
        f"{part.kv_rank} + {part.rope_dim} cached",
        _rotary(part.rotary, part.rope_dim),
        f"scale {part.scale:g}",
    ]
    return ", ".join(words + _biases({"output": part.output.bias}))


def _rotary(rotary: RotarySpec, width: int) -> str:
    words = f"rotary θ {rotary.theta:g}"
    if rotary.dim != width:
        words += f" of {rotary.dim}"
    if rotary.kind != "half":
        words += f" {rotary.kind}"
    if scaling := rotary.scaling:
        words += f" {scaling.kind} × {scaling.factor:g} from {scaling.original_max_positions:,}"
    return words


def _mlp(part: MlpSpec) -> str:
    words = [f"{part.kind} mlp: {part.up.in_features} → {part.up.out_features}, {part.activation}"]
    return ", ".join(words + _biases({"all": part.up.bias}))


def _moe(part: MoeSpec) -> str:
    words = [
        f"{part.router.top_k} of {len(part.experts)} experts by {part.router.scoring}, each {_mlp(part.experts[0])}"
    ]
    return ", ".join(words + ([f"and one for all, {_mlp(part.shared)}"] if part.shared else []))


def _biases(biases: dict[str, TensorSpec | None]) -> list[str]:
    present = [name for name, bias in biases.items() if bias]
    return [f"bias on {' and '.join(present)}"] if present else []


def _norm(norm: NormSpec | None) -> str:
    if norm is None:
        return ""
    return f"{norm.kind} {norm.eps:g}" + ("" if norm.weight else " plain") + (" with bias" if norm.bias else "")


def _count(node: object) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors_of(node))
