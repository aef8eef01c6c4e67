"""The tensors and the linear maps of a spec, and the places in a recipe that ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from fastgen.errors import RecipeError

_T = TypeVar("_T")


@dataclass(frozen=True)
class NodeRef:
    """A node of a recipe: dotted path, file and 1-based line; ``text`` is the value that stands there."""

    path: str
    file: str
    line: int
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.path}"

    def error(self, message: str) -> RecipeError:
        """Returns an error that names this node."""
        return RecipeError(message, file=self.file, line=self.line, node=self.path)


@dataclass(frozen=True)
class Layout:
    """The mapping from a stored tensor to a parameter of ``[rows]`` or ``[rows, in]``.

    ``pattern`` is the left side of an einops pattern that names the stored axes, such as
    ``"(num_kv_heads part head_dim) in"``. ``in`` is the input axis and goes last; all other axes, in their order, make
    the rows. ``sizes`` gives the size of every name. A tensor that several parameters share has an axis ``part``, from
    which this parameter takes the entries ``part[0] .. part[1] - 1``.
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...]
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class TensorSpec:
    """A parameter's tensor in the checkpoint. ``names[0]`` is its own name; the others are alternative spellings.

    ``shape`` is the parameter's shape. ``stored_shape`` is the shape in the file, which differs if there is a
    ``layout``. Where ranks share a model, a rank may hold a ``piece`` of the parameter ``[rows]`` or ``[rows, in]``:
    the first index and the end on each axis. Then ``shape`` is the shape of the piece.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    node: NodeRef
    layout: Layout | None = None
    stored_shape: tuple[int, ...] = ()
    piece: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        if not self.stored_shape:
            object.__setattr__(self, "stored_shape", self.shape)


@dataclass(frozen=True)
class LinearSpec:
    """``y = x Wᵀ (+ b)`` with ``W [out_features, in_features]``.

    Where ranks split the inputs, ``sum_ranks`` says what is summed over them: the results, by the branch that the map
    is in; or the integer products of quantized inputs and weights, by the map itself, which then has all of ``y``.
    """

    weight: TensorSpec
    bias: TensorSpec | None
    in_features: int
    out_features: int
    node: NodeRef
    sum_ranks: Literal["results", "products"] | None = None


def tensors_of(node: object) -> Iterator[TensorSpec]:
    """Yields the tensors at and below a spec (or in a tuple of specs), in the order of its fields."""
    return _below(node, TensorSpec)


def linears_of(node: object) -> Iterator[LinearSpec]:
    """Yields the linear maps at and below a spec (or in a tuple of specs), in the order of its fields."""
    return _below(node, LinearSpec)


def _below(node: object, kind: type[_T]) -> Iterator[_T]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, kind):
            yield node
        elif isinstance(node, tuple):
            waiting += reversed(node)
        else:
            holder: Any = type(node)
            waiting += [getattr(node, name) for name in reversed(_field_names(holder))]


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Returns the names of the fields of a dataclass, and nothing of another type."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()
