"""What a comparison finds, and where in a recipe that is."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastgen.models.recipe.recipe import Recipe
from fastgen.models.spec import ModelSpec, NodeRef

# Largest deviation anywhere in the model, in units of the reference's root mean square: fp32 through many layers.
TOLERANCE = 2e-4

# The same for one module alone.
PROBE_TOLERANCE = 5e-5

# The same for the first attention's cache, before which little has been rounded: a small error of an angle shows.
FIRST_KEYS_TOLERANCE = 3e-5

# The key of the comparison that fails where the configuration holds keys that nobody accounts for, or is refused.
COMPLAINT = "config keys"

# Part of the keys of comparisons of one module alone.
PROBE = " probe "


@dataclass(frozen=True)
class Disagreement:
    """``node`` is the first to disagree; ``region`` are the paths of recipe nodes among which the mistake must be."""

    check: str
    node: NodeRef
    message: str
    region: tuple[str, ...]
    key: str
    difference: float | None = None
    # Tensors of the checkpoint that no node claims.
    unclaimed: tuple[str, ...] = ()


@dataclass
class Comparison:
    """What was compared: ``agreed`` are the keys of all that agreed, in order, with how much they differed."""

    agreed: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    disagreement: Disagreement | None = None
    spec: ModelSpec | None = None

    def agree(self, check: str, key: str, difference: float = 0.0) -> None:
        self.agreed[key] = difference
        self.counts[check] = self.counts.get(check, 0) + 1
        self.largest[check] = max(self.largest.get(check, 0.0), difference)


def node_at(recipe: Recipe, path: str) -> NodeRef:
    """The recipe node at the dotted ``path``, or the deepest that exists on the way to it."""
    parts = tuple(path.split("."))
    tree, depth = recipe.tree, 0
    for part in parts:
        child = tree.child(part)
        if child is None:
            break
        tree, depth = child, depth + 1
    return NodeRef(".".join(parts[:depth]) or path, tree.file, tree.line)


def common_path(paths: list[str]) -> str:
    """The deepest node that all ``paths`` lie in."""
    split = [path.split(".") for path in paths]
    depth = 0
    while all(len(parts) > depth for parts in split) and len({parts[depth] for parts in split}) == 1:
        depth += 1
    return ".".join(split[0][:depth])


def owner_path(path: str) -> str:
    """The node that a tensor's path belongs to: a norm rather than the name of its weight."""
    return path.removesuffix(".weight")


def parent_path(path: str) -> str:
    """The node that ``path`` lies in, as far as it is one of few: not the model, nor all layers."""
    parent = path.rpartition(".")[0]
    return parent if parent not in ("", "model", "model.layers", "model.layers.residual", "config") else path


def branch_path(path: str) -> str:
    """The branch of the layer that ``path`` lies in, or its part of the model."""
    parts = path.split(".")
    return ".".join(parts[:4] if parts[:3] == ["model", "layers", "residual"] else parts[:2])
