"""Checks the weight map of a recipe: every tensor is claimed once, every claimed tensor exists, all shapes match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.spec import ModelSpec, TensorSpec
from fastgen.verify.cases import Case
from fastgen.verify.disagreement import Comparison, Disagreement, common_path, node_at, owner_path, parent_path
from fastgen.verify.reference import Trace


def weight_disagreements(recipe: Recipe, case: Case, spec: ModelSpec, comparison: Comparison) -> Iterator[Disagreement]:
    found = Checkpoint.open(case.directory).tensors
    claimed: dict[str, TensorSpec] = {}
    missing: list[TensorSpec] = []
    for tensor in spec.tensors():
        present = [name for name in tensor.names if name in found]
        claimed |= dict.fromkeys(present, tensor)
        if not present:
            missing.append(tensor)
    unclaimed = [
        name
        for name in found
        if name not in claimed and not any(fnmatchcase(name, pattern) for pattern in spec.ignored_tensors)
    ]
    misshaped = [
        (name, tensor) for name, tensor in claimed.items() if tuple(found[name].shape) != _stored_shape(tensor)
    ]
    asked = {tensor.names[0] for tensor in missing}
    respelled = [name for name in unclaimed if any(own.endswith(f".{name}") for own in asked)]
    if missing and len(respelled) == len(asked) == len(unclaimed):
        message = f"this file calls {missing[0].names[0]} {respelled[0]}, a spelling that the recipe does not list"
        yield Disagreement("weights", node_at(recipe, "aliases"), message, ("aliases",), "spellings")
    if missing:
        names = ", ".join(tensor.names[0] for tensor in missing[:3])
        message = f"{len(missing)} tensors that it needs are missing: {names}"
        if unclaimed:
            message += f"; no node claims {', '.join(unclaimed[:3])}"
        yield _of_paths(recipe, [_owner(recipe, tensor) for tensor in missing], message, "missing", unclaimed)
    if misshaped:
        name, tensor = misshaped[0]
        message = f"{name} is {list(found[name].shape)}, the recipe expects {list(_stored_shape(tensor))}"
        paths = [tensor.node.path.removesuffix(".fused") for _, tensor in misshaped]  # layout or split may be wrong too
        yield _of_paths(recipe, paths, message, "shapes")
    surplus = [name for name in unclaimed if name in case.surplus]
    if surplus:
        message = f"{len(surplus)} tensors that are not weights are neither claimed nor ignored: {surplus[0]}"
        yield Disagreement("weights", node_at(recipe, "ignores.tensors"), message, ("ignores",), "surplus")
    if unclaimed:
        message = f"{len(unclaimed)} tensors are claimed by no node: {', '.join(unclaimed[:3])}"
        ran = [name for name in unclaimed if name.rpartition(".")[0] in case.trace.order]
        beside = [_beside(name, claimed, case.trace) for name in ran or unclaimed]
        yield _of_paths(recipe, beside, message, "unclaimed", unclaimed)
    comparison.agree("weights", "weights")
    comparison.counts["weights"] += len(claimed) - 1


def _owner(recipe: Recipe, tensor: TensorSpec) -> str:
    """Returns the node that needs a tensor; for a bias the node with the key ``bias``."""
    path = tensor.node.path
    while tensor.names[0].endswith(".bias") and path:
        if node_at(recipe, f"{path}.bias").path == f"{path}.bias":
            return path
        path = path.rpartition(".")[0]
    return tensor.node.path


def _stored_shape(tensor: TensorSpec) -> tuple[int, ...]:
    return getattr(tensor, "stored_shape", tensor.shape)


def _of_paths(recipe: Recipe, paths: list[str], message: str, key: str, unclaimed: Sequence[str] = ()) -> Disagreement:
    """Returns a disagreement of several nodes, located at their common node if that is in a branch, else the first."""
    owners = list(dict.fromkeys(owner_path(path) for path in paths))
    common = common_path(owners)
    path = common if common.count(".") >= 3 else owners[0]
    around = [path] if path == common else owners
    region = tuple(dict.fromkeys([*around, *(parent_path(each) for each in around)]))
    return Disagreement("weights", node_at(recipe, path), message, region, key, unclaimed=tuple(unclaimed))


def _beside(name: str, claimed: dict[str, TensorSpec], trace: Trace) -> str:
    """Returns the node where an unclaimed tensor belongs: that of its own module, else of the module that runs next."""
    module = name.rpartition(".")[0]
    by_module = {other.rpartition(".")[0]: tensor.node.path for other, tensor in claimed.items()}
    if module in by_module:
        return by_module[module]
    prefix, near = module, dict[str, str]()
    while prefix and not near:
        prefix = prefix.rpartition(".")[0]
        near = {other: path for other, path in by_module.items() if other.startswith(f"{prefix}." if prefix else "")}
    common = common_path(list(near.values())) or "model"
    run = trace.order.get(module, -1)
    ran = sorted((trace.order.get(other, -1), path) for other, path in near.items())
    later = next((path for order, path in ran if order > run), None)
    earlier = next((path for order, path in reversed(ran) if order < run), None)
    if common == "model" and earlier is not None:
        later = earlier if earlier.startswith("model.embedding") else later
    if common.count(".") >= 4:
        return common  # the tensor belongs inside a part
    if later is None:
        return common if run < 0 else common.rpartition(".")[0] or "model"
    below = later.removeprefix(common).strip(".").split(".")[0]
    return f"{common}.{below}".strip(".")
