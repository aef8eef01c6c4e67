"""The numbers of ranks over which a model can be split."""

from __future__ import annotations

from collections.abc import Iterator

from fastgen.compile.weights.formats import GROUP, QUANTIZED_BY_ROWS, QuantizedFormat
from fastgen.compile.weights.packed import MAX_IN_FEATURES
from fastgen.errors import InvalidArgumentError
from fastgen.models.spec import AttentionSpec, LatentAttentionSpec, LinearSpec, MlpSpec, ModelSpec, MoeSpec, PartSpec

Part = AttentionSpec | LatentAttentionSpec | MlpSpec | MoeSpec

# Formats with a scale for each group of inputs of a matrix.
_GROUPED: tuple[QuantizedFormat, ...] = ("int4", "int4_weight_only")


def parallel_sizes(spec: ModelSpec, most: int, weight_format: QuantizedFormat | None = None) -> tuple[int, ...]:
    """Returns the numbers of ranks, up to ``most``, over which the whole model ``spec`` can be split."""
    return tuple(count for count in range(1, most + 1) if obstacle(spec, count, weight_format) is None)


def check_count(spec: ModelSpec, count: int, weight_format: QuantizedFormat | None = None) -> None:
    """Checks that the whole model ``spec`` can be split over ``count`` ranks.

    :raises InvalidArgumentError: if not; the message has the number that does not divide and the numbers of ranks that
        are possible.
    """
    found = obstacle(spec, count, weight_format)
    if found is not None:
        known = ", ".join(map(str, parallel_sizes(spec, max(spec.num_heads, 1), weight_format)))
        raise InvalidArgumentError(
            f"tensor_parallel={count}: {found}; {spec.architecture} can be split over {known} devices"
        )


def obstacle(spec: ModelSpec, count: int, weight_format: QuantizedFormat | None = None) -> str | None:
    """Returns why the whole model cannot be split over ``count`` ranks; ``None`` if it can.

    Heads of a layer, its KV heads, and features of its feed-forward parts are divided evenly. With fewer KV heads than
    ranks each is held by equally many ranks. In a format with groups of 32 inputs that share a scale, a rank's inputs
    are whole groups.
    """
    if count < 1:
        return "it must be at least 1"
    if count == 1:
        return None
    if spec.vocab_size < count:
        return f"a vocabulary of {spec.vocab_size} has fewer tokens than there are ranks"
    for branch in (branch for layer in spec.layers for branch in layer.branches):
        for each in branch.parts:
            found = _part_obstacle(each, count)
            if found is not None:
                return found
            if weight_format in _GROUPED:
                for linear in by_inputs(each.part):
                    if linear.in_features % (count * GROUP):
                        return (
                            f"a share of {linear.in_features} inputs is no multiple of the {GROUP} that share a scale "
                            f"in {weight_format}"
                        )
            if weight_format in QUANTIZED_BY_ROWS:
                most = max(linear.in_features for linear in by_inputs(each.part))
                if most > MAX_IN_FEATURES:
                    return f"a sum of {most} products of 8 bits has no room in the 32 in which ranks add them"
    return None


def _part_obstacle(spec: PartSpec, count: int) -> str | None:
    part = spec.part
    if isinstance(part, AttentionSpec | LatentAttentionSpec) and part.num_heads % count:
        return f"{part.num_heads} heads cannot be split evenly"
    if isinstance(part, AttentionSpec):
        if part.num_kv_heads % count and count % part.num_kv_heads:
            return f"{part.num_kv_heads} KV heads cannot be split evenly"
        for qk_norm in (part.q_norm, part.k_norm):
            if qk_norm is not None and qk_norm.over == "all" and qk_norm.norm.kind != "rms":
                return "a layer norm over all heads cannot be split"
    for mlp in mlps_of(part):
        if mlp.up.out_features % count:
            return f"{mlp.up.out_features} features of a feed-forward layer cannot be split evenly"
    return None


def mlps_of(part: Part) -> tuple[MlpSpec, ...]:
    """Returns the feed-forward layers of a part, one of its experts for all."""
    match part:
        case MlpSpec():
            return (part,)
        case MoeSpec():
            return (part.experts[0], *([part.shared] if part.shared else []))
    return ()


def by_inputs(part: Part) -> Iterator[LinearSpec]:
    """Yields the maps of a part that are split by their inputs, one of its experts for all."""
    if isinstance(part, AttentionSpec | LatentAttentionSpec):
        yield part.output
    yield from (mlp.down for mlp in mlps_of(part))
