"""Finds the roles of a checkpoint's modules from its headers, and the sizes that follow from their shapes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fastgen.errors import CheckpointError
from fastgen.models.registry.nearest import LISTED
from fastgen.recipe_tools.propose.evidence import Evidence, Experts, Module
from fastgen.recipe_tools.propose.keys import Keys
from fastgen.recipe_tools.propose.matching import Match, match_experts, match_layer
from fastgen.recipe_tools.propose.words import (
    about_feed_forward,
    about_norm,
    comes_second,
    is_shared,
    name_score,
    words,
)

_USUAL_HEAD_DIMS: Final = (128, 64, 96, 80, 256, 32, 112, 160, 16, 8)


@dataclass
class Norms:
    """The norms of a layer by position: before a part, after it, or on queries and keys."""

    attend: Module | None = None
    transform: Module | None = None
    after_attend: Module | None = None
    after_transform: Module | None = None
    q: Module | None = None
    k: Module | None = None
    inside: tuple[Module, ...] = ()  # inside the attention, and of neither the stream nor queries nor keys

    @property
    def stream(self) -> list[Module]:
        each = (self.attend, self.transform, self.after_attend, self.after_transform)
        return [module for module in each if module is not None]


@dataclass
class Mixture:
    """A mixture of experts; ``forward`` is the feed-forward of one expert."""

    experts: Experts
    forward: Match
    router: Module
    correction: tuple[Module, str] | None
    shared: Match | None
    shared_gate: Module | None


@dataclass
class Structure:
    """All modules that have a role. ``heads_known`` is false if the number of heads is a guess."""

    hidden: int
    vocab: int
    tokens: Module
    attention: Match
    norms: Norms
    forward: Match | None
    mixture: Mixture | None
    head: Module | None = None
    positions: Module | None = None
    project_in: Module | None = None
    project_out: Module | None = None
    embedding_norm: Module | None = None
    final_norm: Module | None = None
    latent_norms: dict[str, Module] = field(default_factory=dict)
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1
    heads_known: bool = True

    @property
    def width(self) -> int:
        return self.tokens.weight[1]

    def is_in_attention(self, module: Module) -> bool:
        """Returns whether ``module`` is inside the module that has the attention's matrices and nothing else's."""
        paths = [each.name.split(".")[:-1] for each in self.attention.roles.values()]
        at = ".".join(each[0] for each in itertools.takewhile(_are_equal, zip(*paths, strict=False))) + "."
        parts = (self.forward, self.mixture.forward if self.mixture else None)
        others = [each.name for part in parts if part is not None for each in part.roles.values()]
        return at != "." and module.name.startswith(at) and not any(other.startswith(at) for other in others)


def _are_equal(parts: Sequence[str]) -> bool:
    return len(set(parts)) == 1


def read_structure(evidence: Evidence, keys: Keys) -> Structure:
    """Finds the roles of all modules.

    Raises :class:`CheckpointError` if there are no layers, no embedding or no attention.
    """
    if not evidence.shapes:
        raise CheckpointError("the checkpoint contains no tensors")
    if not evidence.layers_at:
        raise CheckpointError("no tensors are numbered by layer (as in `layers.0.…`), so there is nothing to propose")
    hidden = _hidden(evidence, keys)
    tokens = _tokens(evidence, keys, hidden)
    mixture, others = _mixture(evidence, hidden)
    sizes = frozenset(module.weight[0] for module in evidence.layer if len(module.weight) == 1)
    attention, forward = match_layer(others, hidden, norm_sizes=sizes, needs_mlp=mixture is None)
    if attention is None:
        raise CheckpointError(_no_part("attention", evidence, hidden))
    if forward is None and mixture is None:
        raise CheckpointError(_no_part("feed-forward", evidence, hidden))
    structure = Structure(hidden, tokens.weight[0], tokens, attention, Norms(), forward, mixture)
    _heads(structure, evidence, keys)
    _norms(structure, others)
    _ends(structure, evidence)
    return structure


def _no_part(part: str, evidence: Evidence, hidden: int) -> str:
    """Returns the error about layers without a recognised ``part``, with the tensors that are there."""
    at = evidence.layers_at
    shapes = {
        f"{module.name}.{last}".lstrip("."): shape for module in evidence.layer for last, shape in module.shapes.items()
    }
    message = f"no modules below {at} fit {'an' if part[0] == 'a' else 'a'} {part} over {hidden} features"
    listed = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())[:LISTED])
    return f"{message}; there are {listed or 'only indices'}"


def _hidden(evidence: Evidence, keys: Keys) -> int:
    """Returns the width of the stream: the one in the configuration if tensors have it, else the most common one."""
    inside = Counter(size for module in evidence.layer for size in module.weight if len(module.weight) <= 2)
    stated = keys.number("hidden_size")
    if stated is not None and inside[stated]:
        return stated
    norms = Counter(module.weight[0] for module in evidence.layer if len(module.weight) == 1)
    tables = Counter(module.weight[1] for module in evidence.top if len(module.weight) == 2)
    for counter in (tables, norms, inside):
        for size, _ in counter.most_common():
            if inside[size] and size > 1:
                return size
    raise CheckpointError(f"the tensors below {evidence.layers_at} share no size with the embedding")


def _tokens(evidence: Evidence, keys: Keys, hidden: int) -> Module:
    tables = [module for module in evidence.top if len(module.weight) == 2 and min(module.weight) > 0]
    vocab = keys.number("vocab_size")
    fitting = [module for module in tables if module.weight[0] == vocab] or [
        module for module in tables if module.weight[1] == hidden
    ]
    if not fitting:
        raise CheckpointError(f"no tensor outside the layers is a token embedding of {hidden} features")
    return max(
        fitting,
        key=lambda module: (
            name_score("tokens", module.name)
            - name_score("head", module.name)
            - 2 * name_score("positions", module.name),
            module.weight[0],
        ),
    )


def _mixture(evidence: Evidence, hidden: int) -> tuple[Mixture | None, list[Module]]:
    """Returns the mixture of experts, if there is one, and the other modules of a layer."""
    modules = list(evidence.layer)
    for experts in evidence.experts:
        forward = match_experts(experts.modules, hidden)
        here = [module for module in modules if module.layers == experts.layers]
        routers = [module for module in here if module.weight == (experts.count, hidden)]
        router = max(routers, key=lambda each: name_score("router", each.name), default=None)
        if forward is None or router is None:
            continue
        correction = next(
            (
                (module, last)
                for module in modules
                for last, shape in module.shapes.items()
                if shape == (experts.count,)
                and module.layers == experts.layers
                and last != "weight"
                and not (module is router and last == "bias")
            ),
            None,
        )
        shared_modules = [module for module in here if is_shared(module.name)]
        shared = match_experts(shared_modules, hidden)
        gate = next((module for module in shared_modules if module.weight == (1, hidden)), None)
        taken = {id(router)} | {id(each) for each in shared_modules}
        others = [module for module in modules if id(module) not in taken]
        return Mixture(experts, forward, _only(router, "weight"), correction, shared, gate), others
    return None, modules


def _only(module: Module, last: str) -> Module:
    return Module(module.name, {last: module.shapes[last]}, module.layers)


def _best_named(modules: Sequence[Module], role: str) -> Module | None:
    """Returns the module whose name matches ``role`` best, if any name matches."""
    worth = {module.name: name_score(role, module.name) for module in modules}
    return max((each for each in modules if worth[each.name] > 0), key=lambda each: worth[each.name], default=None)


def _heads(structure: Structure, evidence: Evidence, keys: Keys) -> None:
    """Finds query heads, KV heads and head size from the configuration, as far as the shapes allow."""
    attention = structure.attention
    queries = attention.size("output")[1]
    heads = keys.number("num_heads")
    stated = keys.number("head_dim")
    if attention.kind == "latent":
        structure.heads_known = heads is not None and queries % heads == 0
        structure.num_heads = structure.num_kv_heads = heads if heads and queries % heads == 0 else 1
        rows = attention.size("q_up" if "q_up" in attention.roles else "q")[0]
        structure.head_dim = rows // structure.num_heads
        structure.latent_norms = _latent_norms(structure, evidence)
        return
    shared = attention.size("k")[0] if attention.kind == "three" else (attention.size("qkv")[0] - queries) // 2
    if heads is None or queries % heads or shared % (queries // heads):
        structure.heads_known = stated is not None and queries % stated == 0 and shared % stated == 0
        usual = (size for size in _USUAL_HEAD_DIMS if queries % size == 0 and shared % size == 0)
        size = stated if structure.heads_known and stated else next(usual, shared)
        heads = queries // size
    structure.num_heads, structure.head_dim = heads, queries // heads
    structure.num_kv_heads = shared // structure.head_dim


def _latent_norms(structure: Structure, evidence: Evidence) -> dict[str, Module]:
    roles = {"kv": structure.attention.size("kv_up")[1]}
    if "q_up" in structure.attention.roles:
        roles["q"] = structure.attention.size("q_up")[1]
    found: dict[str, Module] = {}
    for role, size in roles.items():
        fitting = [each for each in evidence.layer if each.weight == (size,) and each not in found.values()]
        named = [each for each in fitting if role in words(each.name)]
        normed = [each for each in named or fitting if about_norm(each.name)]
        if norms := normed or named or fitting:
            found[role] = norms[0]
    return found


def _norms(structure: Structure, modules: list[Module]) -> None:
    """Finds the norms of queries and keys by size and name, and those of the stream by name, in execution order."""
    norms, size = structure.norms, structure.head_dim
    used = structure.attention.modules | (structure.forward.modules if structure.forward else frozenset())
    used |= {id(each) for each in structure.latent_norms.values()}
    free = [each for each in modules if id(each) not in used and each.is_plain]
    layers = next(iter(structure.attention.roles.values())).layers
    free = [each for each in free if each.layers == layers]
    for role, heads in (("q", structure.num_heads), ("k", structure.num_kv_heads)):
        shapes = ((size,), (heads * size,), (heads, size))
        found = _best_named([each for each in free if each.weight in shapes], f"{role}_norm")
        if found is not None and structure.attention.kind != "latent":
            setattr(norms, role, found)
            free.remove(found)
    inside = [each for each in free if len(each.weight) == 1 and structure.is_in_attention(each)]
    stream = [each for each in free if each.weight == (structure.hidden,)]
    outside = [each for each in stream if each not in inside]
    if len(outside) >= 2:  # enough for both parts
        stream = outside
    norms.inside = tuple(each for each in inside if each not in stream)
    _place(norms, sorted(stream, key=lambda each: (comes_second(each.name), each.name)))


def _place(norms: Norms, stream: list[Module]) -> None:
    before = [each for each in stream if not _follows(each, stream)]
    after = [each for each in stream if _follows(each, stream)]
    if len(before) > 2:  # too many norms before parts: the others are after parts
        before, after = before[:2], [*after, *before[2:]]
    if (
        len(before) == 1 and len(after) == 1 and len(stream) == 2
    ):  # `post_attention` beside `input` is before the second
        before, after = [before[0], after[0]], []
    for name, module in zip(("attend", "transform"), before, strict=False):
        setattr(norms, name, module)
    after.sort(key=lambda each: about_feed_forward(each.name))
    for name, module in zip(("after_attend", "after_transform"), after, strict=False):
        setattr(norms, name, module)


def _follows(norm: Module, stream: list[Module]) -> bool:
    """Returns whether the name says that the norm is after a part."""
    found = set(words(norm.name))
    return bool(found & {"post", "after", "output", "out"}) and len(stream) > 1


def _ends(structure: Structure, evidence: Evidence) -> None:
    """Finds the modules before the first layer and after the last."""
    hidden, width, vocab = structure.hidden, structure.width, structure.vocab
    free = [each for each in evidence.top if each is not structure.tokens and each.is_plain]

    heads = [each for each in free if each.weight in ((vocab, width), (vocab, hidden))]
    structure.head = _best_named(heads, "head") or next(iter(heads), None)
    if width != hidden:
        structure.project_in = next((each for each in free if each.weight == (hidden, width)), None)
        structure.project_out = next((each for each in free if each.weight == (width, hidden)), None)
    taken = (structure.head, structure.project_in, structure.project_out)
    free = [each for each in free if each not in taken]
    least = Keys(evidence).number("max_positions") or 1
    tables = [each for each in free if len(each.weight) == 2 and each.weight[1] == hidden and each.weight[0] >= least]
    structure.positions = _best_named(tables, "positions") or next(iter(tables), None)
    norms = [each for each in free if each.weight == (hidden,)]
    by_embedding = [each for each in norms if {"embed", "embedding", "embeddings", "emb"} & set(words(each.name))]
    finals = [each for each in norms if each not in by_embedding]
    structure.embedding_norm = by_embedding[0] if by_embedding else None
    structure.final_norm = max(finals, key=lambda each: "final" in words(each.name), default=None)
