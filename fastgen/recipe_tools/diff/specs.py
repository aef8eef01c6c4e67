"""Compares the models that two recipes make of one configuration: their numbers, tensors and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Final

from fastgen.errors import RecipeError
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NodeRef,
    PartSpec,
    TensorSpec,
)
from fastgen.recipe_tools.explain.plain_text import layer_list, printable

_KINDS: Final = {AttentionSpec: "attention", LatentAttentionSpec: "latent_attention", MlpSpec: "mlp", MoeSpec: "moe"}
_NUMBERS: Final = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions"),
    *("num_parameters", "tied"),
)

# The content of a model by dotted path: each number, and each tensor with its shape.
Leaves = dict[str, str]

Rename = Callable[[str], str]


@dataclass(frozen=True)
class SpecDifference:
    """One difference at ``path`` in ``layers`` (``None`` outside the layers), as lines for each side.

    A side that has nothing there is empty. A subtree that only one side has is folded into one difference.
    """

    path: str
    layers: tuple[int, ...] | None
    a: tuple[str, ...]
    b: tuple[str, ...]

    @property
    def place(self) -> str:
        """The location as text, for people."""
        return ": ".join(part for part in ("" if self.layers is None else layer_list(self.layers), self.path) if part)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def spec_differences(
    a: Recipe, b: Recipe, config: Mapping[str, Any], *, config_file: str = "config.json"
) -> list[SpecDifference]:
    """Returns the differences of the models that ``a`` and ``b`` make of ``config``.

    A key that one of the recipes does not account for is a difference, not an error. Raises
    :class:`~fastgen.errors.RecipeError` if a recipe cannot be resolved against the configuration.
    """
    (spec_a, refused_a), (spec_b, refused_b) = (_resolved(each, config, config_file) for each in (a, b))
    found = []
    if refused_a != refused_b:
        found.append(SpecDifference("keys of the configuration it does not account for", None, refused_a, refused_b))
    found += [SpecDifference(path, None, *sides) for path, *sides in _compared(_ends(spec_a), _ends(spec_b))]
    in_layers: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for index in range(max(spec_a.num_layers, spec_b.num_layers)):
        sides = (_layer(recipe, spec, index) for recipe, spec in ((a, spec_a), (b, spec_b)))
        for difference in _compared(*sides):
            in_layers.setdefault(difference, []).append(index)
    return found + [SpecDifference(path, tuple(layers), *sides) for (path, *sides), layers in in_layers.items()]


def _resolved(recipe: Recipe, config: Mapping[str, Any], file: str) -> tuple[ModelSpec, tuple[str, ...]]:
    """Returns the model, and the complaints about keys of the configuration that had to be ignored for it."""
    try:
        return resolve(recipe, config, config_file=file), ()
    except RecipeError as error:
        spec = resolve(recipe, config, config_file=file, allow_config_keys=list(config))
        return spec, tuple(printable(line[2:]) for line in error.message.splitlines() if line.startswith("- "))


def _compared(a: Leaves, b: Leaves) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yields paths that differ, with both sides' lines; what only one side has is folded to the highest path."""
    done: set[str] = set()
    for path in dict.fromkeys([*a, *b]):
        if a.get(path) == b.get(path):
            continue
        if path in a and path in b:
            yield path, (a[path],), (b[path],)
            continue
        own, other = (a, b) if path in a else (b, a)
        folded = next(prefix for prefix in _prefixes(path) if not any(_is_below(each, prefix) for each in other))
        if folded not in done:
            done.add(folded)
            below = [each for each in own if _is_below(each, folded)]
            lines = tuple(f"{each[len(folded) :].lstrip('.')}: {own[each]}".removeprefix(": ") for each in below)
            yield folded, *((lines, ()) if own is a else ((), lines))


def _prefixes(path: str) -> Iterator[str]:
    keys = path.split(".")
    return (".".join(keys[:count]) for count in range(len(keys) + 1))


def _is_below(path: str, prefix: str) -> bool:
    return not prefix or path == prefix or path.startswith(f"{prefix}.")


def _ends(spec: ModelSpec) -> Leaves:
    """Returns everything except the layers."""
    numbers = {name: _value(getattr(spec, name)) for name in _NUMBERS}
    numbers["kv_bytes_per_token"] = f"{spec.kv_bytes_per_token(2):,} in 16 bits"
    numbers["layers.count"] = _value(len(spec.layers))
    parts = {"embedding": spec.embedding, "final_norm": spec.final_norm, "head": spec.head}
    return numbers | {path: text for name, part in parts.items() for path, text in _leaves(part, name, str)}


def _layer(recipe: Recipe, spec: ModelSpec, index: int) -> Leaves:
    """Returns the content of one layer, without its index in tensor names; empty if there is no such layer."""
    if index >= len(spec.layers):
        return {}
    layer: LayerSpec = spec.layers[index]
    layers = recipe.schema.model.layers
    at = layers.at.replace("{layer}", str(index))
    found: Leaves = {"branches": ", ".join(branch.name for branch in layer.branches)}
    for branch in layer.branches:
        moe = layers.residual[branch.name].moe
        expert_at = f"{at}.{moe.experts.at.replace('{layer}', str(index)).replace('{expert}', '0')}" if moe else None

        def rename(name: str, expert_at: str | None = expert_at, experts: str = moe.experts.at if moe else "") -> str:
            if expert_at is not None and name.startswith(f"{expert_at}."):
                return f"{layers.at}.{experts}{name[len(expert_at) :]}"
            return layers.at + name[len(at) :] if name.startswith(f"{at}.") else name

        found |= dict(_leaves(branch, branch.name, rename))
    return found


def _leaves(node: object, path: str, rename: Rename) -> Iterator[tuple[str, str]]:
    match node:
        case None | NodeRef():
            return
        case TensorSpec():
            yield path, _tensor(node, rename)
        case PartSpec():
            kind = f"{path.rpartition('.')[0]}.{_KINDS[type(node.part)]}"
            yield from _leaves(node.norm, f"{kind}.norm", rename)
            yield from _leaves(node.part, kind, rename)
        case LinearSpec():  # the matrix shows its sizes
            yield from _leaves(node.weight, f"{path}.weight", rename)
            yield from _leaves(node.bias, f"{path}.bias", rename)
        case MoeSpec():
            yield f"{path}.experts.count", _value(len(node.experts))
            yield from _leaves(node.experts[0], f"{path}.experts.each", rename)  # all are equal
            for name in ("router", "shared", "shared_gate"):
                yield from _leaves(getattr(node, name), f"{path}.{name}", rename)
        case tuple() if all(isinstance(each, PartSpec) for each in node):
            for each in node:
                yield from _leaves(each, path, rename)
        case _ if is_dataclass(node):
            for each in fields(node):
                if each.name != "name":
                    yield from _leaves(getattr(node, each.name), f"{path}.{each.name}", rename)
        case _:
            yield path, _value(node)


def _tensor(tensor: TensorSpec, rename: Rename) -> str:
    text = f"{rename(tensor.names[0])} [{', '.join(map(str, tensor.stored_shape))}]"
    if layout := tensor.layout:
        text += f", stored as {layout.pattern}"
        text += f", parts {layout.part[0]} to {layout.part[1] - 1}" if layout.part else ""
    return printable(text)


def _value(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.9g}"
        case tuple():
            return f"{len(value)} numbers, {', '.join(map(_value, value[:3]))} …"
    return printable(str(value))
