"""Finds the modules of a layer that make the attention and the feed-forward: by shapes first, then by names.

A *hypothesis* assigns a module to each role of a kind of part. Every hypothesis that the shapes allow is scored by how
well the names match the roles. The best attention and the best feed-forward that share no module are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fastgen.recipe_tools.propose.evidence import Module
from fastgen.recipe_tools.propose.words import about_attention, about_feed_forward, name_score

# Outputs and inputs of each role's matrix.
Sizes = Mapping[str, tuple[int, int]]

_CANDIDATES: Final = 6  # most modules tried for a role; those with the best names come first
_PER_MODULE: Final = 2.0  # score for each module that has a role
_TIE: Final = 0.25  # difference of scores below which hypotheses count as equal
_KEPT: Final = 100  # most hypotheses that are compared with one another


@dataclass(frozen=True)
class Match:
    """A kind of part and the module of each of its roles. ``rivals`` are roles that could equally be swapped."""

    kind: str
    roles: Mapping[str, Module]
    score: float
    transposed: bool = False
    rivals: tuple[str, ...] = ()

    def size(self, role: str) -> tuple[int, int]:
        """Returns the outputs and inputs of the matrix of ``role``."""
        return _size(self.roles[role], self.transposed)

    @property
    def modules(self) -> frozenset[int]:
        return frozenset(id(module) for module in self.roles.values())


def match_layer(
    modules: Sequence[Module], hidden: int, *, norm_sizes: frozenset[int], needs_mlp: bool
) -> tuple[Match | None, Match | None]:
    """Returns the attention and the feed-forward among the ``modules`` of a layer."""
    best: tuple[Match | None, Match | None] = None, None
    for transposed in _orientations(modules):
        attentions = _ranked(_attentions(modules, hidden, transposed, norm_sizes))
        forwards = _ranked(feed_forwards(modules, hidden, transposed))
        pair = _best_pair(attentions, forwards, needs_mlp)
        if _worth(pair) > _worth(best):
            best = pair
    return best


def match_experts(modules: Sequence[Module], hidden: int) -> Match | None:
    """Returns the feed-forward that the ``modules`` of an expert make."""
    found = [each for transposed in (False, True) for each in feed_forwards(modules, hidden, transposed)]
    return next(iter(_ranked(found)), None)


def _best_pair(attentions: list[Match], forwards: list[Match], needs_mlp: bool) -> tuple[Match | None, Match | None]:
    best: tuple[Match | None, Match | None] = None, None
    for attention in [*attentions, None]:
        for forward in [*forwards, None]:
            together = (attention.score if attention else 0) + (forward.score if forward else 0)
            if together <= _worth(best):
                break  # all following ones are worse
            if attention is None or forward is None or not attention.modules & forward.modules:
                best = attention, forward
                break
    return best


def _worth(pair: tuple[Match | None, Match | None]) -> float:
    return sum(match.score for match in pair if match is not None)


def _orientations(modules: Sequence[Module]) -> tuple[bool, ...]:
    """Returns the possible orientations of matrices: a bias has the size of the outputs, so it decides if
    there is one.
    """
    votes = {
        module.weight[1] == module.shapes["bias"][0]
        for module in modules
        if len(module.weight) == 2 and len(module.shapes.get("bias", ())) == 1 and module.weight[0] != module.weight[1]
    }
    return tuple(sorted(votes)) if len(votes) == 1 else (False, True)


def _size(module: Module, transposed: bool) -> tuple[int, int]:
    rows, columns = module.weight
    return (columns, rows) if transposed else (rows, columns)


def _attentions(
    modules: Sequence[Module], hidden: int, transposed: bool, norm_sizes: frozenset[int]
) -> Iterator[Match]:
    def three(sizes: Sizes) -> bool:
        (q, _), (k, _), (v, _), output = sizes["q"], sizes["k"], sizes["v"], sizes["output"]
        reads = all(sizes[role][1] == hidden for role in "qkv")
        return reads and k == v and q % k == 0 and output == (hidden, q)

    def fused(sizes: Sizes) -> bool:
        (rows, read), (made, queries) = sizes["qkv"], sizes["output"]
        twice = rows - queries
        fits = read == made == hidden and twice > 0 and twice % 2 == 0
        return fits and 2 * queries >= twice and queries % (twice // 2) == 0

    def latent(sizes: Sizes) -> bool:
        (narrow, read), (_, rank), (made, _) = sizes["kv_down"], sizes["kv_up"], sizes["output"]
        fits = read == made == hidden and narrow > rank and rank in norm_sizes
        if "q" in sizes:
            return fits and sizes["q"][1] == hidden
        (q_rank, q_read), (_, q_narrow) = sizes["q_down"], sizes["q_up"]
        return fits and q_read == hidden and q_rank == q_narrow and q_rank in norm_sizes

    for kind, roles, fits in (
        ("three", ("q", "k", "v", "output"), three),
        ("fused", ("qkv", "output"), fused),
        ("latent", ("q_down", "q_up", "kv_down", "kv_up", "output"), latent),
        ("latent", ("q", "kv_down", "kv_up", "output"), latent),
    ):
        plain = [module for module in modules if kind != "fused" or about_attention(module.name) or _is_fused(module)]
        yield from _hypotheses(kind, roles, plain, fits, transposed, _for_attention)


def _is_fused(module: Module) -> bool:
    return name_score("qkv", module.name) > 0 or name_score("output", module.name) > 0


def feed_forwards(modules: Sequence[Module], hidden: int, transposed: bool) -> Iterator[Match]:
    """Yields the feed-forwards that some of ``modules`` may make."""

    def gated(sizes: Sizes) -> bool:
        size = sizes["up"][0]
        return sizes["gate"] == sizes["up"] == (size, hidden) and sizes["down"] == (hidden, size)

    def plain(sizes: Sizes) -> bool:
        size = sizes["up"][0]
        return sizes["up"] == (size, hidden) and sizes["down"] == (hidden, size)

    def fused(sizes: Sizes) -> bool:
        size = sizes["down"][1]
        return sizes["gate_up"] == (2 * size, hidden) and sizes["down"] == (hidden, size)

    for kind, roles, fits in (
        ("gated", ("gate", "up", "down"), gated),
        ("fused", ("gate_up", "down"), fused),
        ("plain", ("up", "down"), plain),
    ):
        yield from _hypotheses(kind, roles, modules, fits, transposed, _for_feed_forward)


def _for_attention(module: Module) -> float:
    return about_attention(module.name) - 2.0 * about_feed_forward(module.name)


def _for_feed_forward(module: Module) -> float:
    return about_feed_forward(module.name) - 2.0 * about_attention(module.name)


def _hypotheses(
    kind: str,
    roles: Sequence[str],
    modules: Sequence[Module],
    fits: Callable[[Sizes], bool],
    transposed: bool,
    context: Callable[[Module], float],
) -> Iterator[Match]:
    matrices = [module for module in modules if len(module.weight) == 2 and module.is_plain and min(module.weight) > 0]
    worth = {
        role: sorted(
            ((name_score(role, each.name) + context(each), index) for index, each in enumerate(matrices)),
            key=lambda pair: (-pair[0], pair[1]),
        )[:_CANDIDATES]
        for role in roles
    }

    def extend(taken: dict[str, int], score: float) -> Iterator[Match]:
        if len(taken) == len(roles):
            chosen = {role: matrices[index] for role, index in taken.items()}
            if fits({role: _size(module, transposed) for role, module in chosen.items()}):
                same_layers = len({module.layers for module in chosen.values()}) == 1
                parents = {module.name.rpartition(".")[0] for module in chosen.values()}
                if same_layers:
                    yield Match(kind, chosen, score + (len(parents) == 1), transposed)
            return
        role = roles[len(taken)]
        for value, index in worth[role]:
            if index not in taken.values():
                yield from extend({**taken, role: index}, score + value + _PER_MODULE)

    yield from extend({}, 0.0)


def _ranked(matches: Iterator[Match] | list[Match]) -> list[Match]:
    """Sorts matches, the best first; adds to each the roles that a nearly equal match gives to other modules."""
    ranked = sorted(matches, key=lambda match: -match.score)[:_KEPT]
    result = []
    for place, match in enumerate(ranked):
        rivals: set[str] = set()
        for other in ranked[place + 1 :]:
            if other.score < match.score - _TIE:
                break
            if other.kind == match.kind and other.modules == match.modules:
                rivals |= {role for role in match.roles if other.roles[role] is not match.roles[role]}
        result.append(
            Match(match.kind, match.roles, match.score, match.transposed, tuple(r for r in match.roles if r in rivals))
        )
    return result
