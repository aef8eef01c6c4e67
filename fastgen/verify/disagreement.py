"""The result of a comparison, and the recipe nodes that it is about."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastgen.models.recipe.recipe import Recipe
from fastgen.models.spec import ModelSpec, NodeRef

# Largest allowed deviation anywhere in the model, in units of the reference's root mean square: fp32, many layers.
TOLERANCE = 2e-4

# Largest allowed deviation of one module alone.
PROBE_TOLERANCE = 5e-5

# Largest allowed deviation of the first attention's cache: with little rounding before it, small angle errors show.
FIRST_KEYS_TOLERANCE = 3e-5

# The key of the comparison that fails if the configuration has unaccounted keys, or is refused.
COMPLAINT = "config keys"

# Part of the keys of comparisons of one module alone.
PROBE = " probe "


@dataclass(frozen=True)
class Disagreement:
    """A disagreement with the reference.

    ``node`` is the first node that disagrees; ``region`` holds the paths of the nodes among which the mistake must be.
    """

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
    """The result of a comparison: ``agreed`` maps the keys of all that agreed, in order, to their differences."""

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
    """Returns the recipe node at the dotted ``path``, or the deepest existing node on the way to it."""
    parts = tuple(path.split("."))
    tree, depth = recipe.tree, 0
    for part in parts:
        child = tree.child(part)
        if child is None:
            break
        tree, depth = child, depth + 1
    return NodeRef(".".join(parts[:depth]) or path, tree.file, tree.line)


def common_path(paths: list[str]) -> str:
    """Returns the deepest node that contains all ``paths``."""
    split = [path.split(".") for path in paths]
    depth = 0
    while all(len(parts) > depth for parts in split) and len({parts[depth] for parts in split}) == 1:
        depth += 1
    return ".".join(split[0][:depth])


def owner_path(path: str) -> str:
    """Returns the node that a tensor's path belongs to: a norm, not the name of its weight."""
    return path.removesuffix(".weight")


def parent_path(path: str) -> str:
    """Returns the node that contains ``path``; ``path`` itself if that would be the model, all layers or ``config``."""
    parent = path.rpartition(".")[0]
    return parent if parent not in ("", "model", "model.layers", "model.layers.residual", "config") else path


def branch_path(path: str) -> str:
    """Returns the branch of the layer that contains ``path``, or its part of the model."""
    parts = path.split(".")
    return ".".join(parts[:4] if parts[:3] == ["model", "layers", "residual"] else parts[:2])
