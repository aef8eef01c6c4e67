"""Compares node after node, in the order of execution.

If a tensor's module exists on both sides under the tensor's name, its input and output are compared, and it is also run
alone on large and on small inputs (small ones show an eps). The computation between two such modules (scores and
rotation, activation, the sum into the stream) is checked by the input of the next module: if that disagrees while
everything before agrees, the nodes between are wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fastgen.models.checkpoint.weights import arrange
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.spec import AttentionSpec, LatentAttentionSpec, ModelSpec, TensorSpec
from fastgen.verify.cases import Case
from fastgen.verify.disagreement import (
    FIRST_KEYS_TOLERANCE,
    PROBE,
    PROBE_TOLERANCE,
    TOLERANCE,
    Comparison,
    Disagreement,
    branch_path,
    common_path,
    node_at,
    owner_path,
)
from fastgen.verify.subject import Site, SubjectTrace

_PROBE_SCALES = (1.0, 0.003)


def node_disagreements(
    recipe: Recipe, case: Case, spec: ModelSpec, ours: SubjectTrace, comparison: Comparison
) -> Iterator[Disagreement]:
    """Yields the disagreements in order; everything that agrees is recorded in ``comparison``."""
    return _Walk(recipe, case, spec, ours, comparison).disagreements()


class _Walk:
    """Compares site after site, in execution order."""

    def __init__(self, recipe: Recipe, case: Case, spec: ModelSpec, ours: SubjectTrace, comparison: Comparison):
        self.recipe, self.case, self.spec = recipe, case, spec
        self.ours, self.theirs, self.comparison = ours, case.trace, comparison
        self.before = "model.embedding"
        self.attentions = {
            attention.output.weight.names[0]: (index, attention) for index, attention in enumerate(spec.attentions())
        }

    def disagreements(self) -> Iterator[Disagreement]:
        for site in self.ours.sites:
            attention = self.attentions.get(site.tensor.names[0])
            if attention is not None:
                yield from self.cached(*attention)
            name = next((name for name in site.names if name in self.theirs.outputs), None)
            if name is not None:
                yield from self.site(site, name)
            self.before = owner_path(site.tensor.node.path)
        yield from self.ends()

    def site(self, site: Site, name: str) -> Iterator[Disagreement]:
        path = owner_path(site.tensor.node.path)
        node, region = node_at(self.recipe, path), [path]
        theirs = self.theirs.inputs.get(name)
        if theirs is not None and site.input.is_floating_point():
            difference = deviation(site.input, theirs)
            if difference is not None and difference > TOLERANCE:
                yield self.input_disagrees(site, name, difference)
            self.agree(f"{name} input", difference)
        output = rows_of(site.tensor, self.theirs.outputs[name])
        difference = deviation(site.output, output)
        if site.tensor.names == self.spec.embedding.tokens.names:
            # some references scale inside the embedding module; then the recipe's scale has to agree
            scaled = deviation(site.output * self.spec.embedding.scale, output)
            difference = scaled if scaled is not None and scaled <= TOLERANCE else difference
            region.append("model.embedding")
        if difference is not None and difference > TOLERANCE and self.alone_agrees(site, name):
            yield self.input_disagrees(site, name, deviation(site.input, theirs) if theirs is not None else None)
        if difference is not None and difference > TOLERANCE:
            message = f"the output of {name} differs by {difference:.1e}"
            if theirs is None:
                region += self.between(self.before, path)[1]
            else:
                message += ", its input agrees"
            yield Disagreement("nodes", node, message, tuple(region), f"{name} output", difference)
        self.agree(f"{name} output", difference)
        if theirs is None or difference is None or site.input.shape != theirs.shape:
            return
        for scale in _PROBE_SCALES if site.input.is_floating_point() else ():
            x = theirs[:8] * (scale / theirs[:8].square().mean().sqrt().clamp_min(1e-9))
            answer = self.case.reference.probe(name, x)
            answer = None if answer is None else rows_of(site.tensor, answer)
            if answer is None or answer.shape[-1] != site.output.shape[-1]:
                break
            difference = deviation(_inferred(site.probe, x), answer)
            if difference is not None and difference > PROBE_TOLERANCE:
                message = f"{name} alone, on inputs of size {scale:g}, differs by {difference:.1e}"
                yield Disagreement("nodes", node, message, tuple(region), f"{name}{PROBE}{scale}", difference)
            self.agree(f"{name}{PROBE}{scale}", difference)

    def alone_agrees(self, site: Site, name: str) -> bool:
        """Returns whether our module gives the reference's output for its input: then only our input is wrong."""
        x = self.theirs.inputs.get(name)
        if x is None or not site.input.is_floating_point() or x.shape != site.input.shape:
            return False
        difference = deviation(_inferred(site.probe, x), rows_of(site.tensor, self.theirs.outputs[name]))
        return difference is not None and difference <= PROBE_TOLERANCE

    def input_disagrees(self, site: Site, name: str, difference: float | None) -> Disagreement:
        path = owner_path(site.tensor.node.path)
        other = next(
            (
                module
                for module, x in self.theirs.inputs.items()
                if module != name
                and module.rpartition(".")[0] == name.rpartition(".")[0]
                and (deviation(site.input, x) or 0.0 if x.shape == site.input.shape else 1.0) < TOLERANCE
            ),
            None,
        )
        difference = difference or 0.0
        message = f"the input of {name} differs by {difference:.1e}"
        if other is not None:
            message += f"; in the reference it is the input of {other}"
            node, around = node_at(self.recipe, path), (path, branch_path(self.before), branch_path(path))
            return Disagreement("nodes", node, message, around, f"{name} input", difference)
        message += f", everything before it agrees ({self.before})"
        blamed, region = self.between(self.before, path)
        return Disagreement("nodes", node_at(self.recipe, blamed), message, region, f"{name} input", difference)

    def between(self, before: str, after: str) -> tuple[str, tuple[str, ...]]:
        """Returns the node to blame for the computation between two sites, and the nodes where the mistake may be."""
        common = common_path([before, after])
        if common.count(".") >= 4:  # inside one part
            return common, (common,)
        branch = branch_path(before)
        return branch, tuple(dict.fromkeys((branch, branch_path(after))))

    def cached(self, index: int, attention: AttentionSpec | LatentAttentionSpec) -> Iterator[Disagreement]:
        """Compares keys and values in the cache: after the rotation, before the scores."""
        if index >= min(len(self.theirs.keys), len(self.ours.keys)):
            return
        node, rotary = attention.node, attention.rotary
        keys, values = self.ours.keys[index], self.ours.values[index]
        their_keys, their_values = self.theirs.keys[index], self.theirs.values[index]
        if isinstance(attention, LatentAttentionSpec):  # one vector per token: the latent, then the rotated key
            rank = attention.kv_rank
            values, keys = [x[..., :rank] for x in keys], [x[..., rank:] for x in keys]
            their_keys, their_values = their_values, their_keys
        for what, ours, theirs in (("values", values, their_values), ("keys", keys, their_keys)):
            pairs = [(mine[len(mine) - len(their) :], their) for mine, their in zip(ours, theirs, strict=True)]
            if any(mine.shape != their.shape for mine, their in pairs):
                continue
            difference = max(_rotated_deviation(mine, their, attention) for mine, their in pairs)
            key = f"attention {index} {what}"
            if difference > (FIRST_KEYS_TOLERANCE if index == 0 else TOLERANCE):
                blamed = rotary.node if rotary is not None and what == "keys" else node
                message = f"the cached {what} of attention {index} differ by {difference:.1e}, the projections agree"
                yield Disagreement("nodes", blamed, message, (node.path,), key, difference)
            self.agree(key, difference)

    def ends(self) -> Iterator[Disagreement]:
        if self.theirs.logits is None:
            return
        names = [name.rpartition(".")[0] for name in (self.spec.head.weight or self.spec.embedding.tokens).names]
        x = next((self.theirs.inputs[name] for name in names if name in self.theirs.inputs), None)
        if (
            x is not None
            and self.spec.head.project is None
            and x.is_floating_point()
            and x.shape == self.ours.hidden.shape
        ):
            difference = deviation(self.ours.hidden, x)
            if difference is not None and difference > TOLERANCE:
                branch = branch_path(self.before)
                blamed = branch if self.before.startswith("model.layers") else "model.final_norm"
                message = f"the final hidden state differs by {difference:.1e}"
                region = (branch, "model.final_norm")
                yield Disagreement("nodes", node_at(self.recipe, blamed), message, region, "hidden", difference)
            self.agree("hidden", difference)
        ours, theirs = self.ours.logits.log_softmax(-1), self.theirs.logits.log_softmax(-1)
        node = node_at(self.recipe, "model.head")
        if ours.shape != theirs.shape:
            message = f"logits are {list(ours.shape)}, the reference's {list(theirs.shape)}"
            yield Disagreement("log-probabilities", node, message, ("model.head",), "logits")
            return
        difference = float((ours - theirs).abs().max())
        if not difference <= TOLERANCE:
            message = f"log-probabilities differ by {difference:.1e}"
            around = ["model.head"] if "hidden" in self.comparison.agreed else ["model.head", "model"]
            yield Disagreement("log-probabilities", node, message, tuple(around), "logits", difference)
        self.comparison.agree("log-probabilities", "logits", difference)

    def agree(self, key: str, difference: float | None) -> None:
        if difference is not None:
            self.comparison.agree("nodes", key, difference)


def deviation(ours: Tensor, theirs: Tensor | None) -> float | None:
    """Returns the largest difference in units of the reference's root mean square; ``None`` if shapes do not match."""
    if theirs is None or ours.numel() != theirs.numel() or ours.shape[0] != theirs.shape[0]:
        return None
    theirs = theirs.reshape(ours.shape).float()
    scale = float(theirs.square().mean().sqrt().clamp_min(1e-12))
    difference = float((ours.float() - theirs).abs().max()) / scale
    return difference if difference == difference else float("inf")


def _rotated_deviation(ours: Tensor, theirs: Tensor, attention: AttentionSpec | LatentAttentionSpec) -> float:
    """Returns the smallest deviation over the orders of rotated pairs: interleaved, or all first features first."""
    difference = deviation(ours, theirs) or 0.0
    if isinstance(attention, LatentAttentionSpec) and theirs.shape[-1] % 2 == 0:
        turned = theirs.reshape(*theirs.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
        difference = min(difference, deviation(ours, turned) or 0.0)
    return difference


def rows_of(tensor: TensorSpec, output: Tensor) -> Tensor | None:
    """Returns the part of a module's output ``[T, rows as stored]`` for the parameter of ``tensor``, rows in order.

    Returns ``None`` if the inputs share a stored axis with others, because then no stored row belongs to one output.
    """
    layout = tensor.layout
    if layout is None:
        return output
    if re.search(r"\([^)]*\bin\b", layout.pattern):
        return None
    sizes = tuple((name, len(output) if name == "in" else size) for name, size in layout.sizes)
    first = layout.pattern.split(" ")[0] == "in"
    rows = arrange(dataclasses.replace(layout, sizes=sizes), output if first else output.T)
    return rows.reshape(-1, len(output)).T


@torch.inference_mode()
def _inferred(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)
