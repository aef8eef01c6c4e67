"""The model spec of one rank, derived from the model spec of the whole model.

Heads of attention and features of feed-forward layers are split over the ranks, as Megatron-LM does (Shoeybi et al.,
2019): the first maps of a part by their outputs, the last one by its inputs. So each rank has a share of the part's
sum, and each branch ends in one sum over the ranks. What is added once, a bias of such a last map or learned positions,
is rank 0's. Where inputs are quantized by rows, the last map itself sums over the ranks: its products are integers, so
their sum is that of one rank, and then each rank scales it and adds the bias. An expert is split like any feed-forward
layer, so all ranks compute equally much, whichever experts tokens go to. The vocabulary is split by rows of its tables.
What remains is small and held by every rank: norms, routers, latent attention's maps down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from glob import escape

from fastgen.compile.host.ranks import share
from fastgen.compile.weights.formats import QUANTIZED_BY_ROWS, QuantizedFormat
from fastgen.models.shard.obstacles import Part, check_count
from fastgen.models.spec import (
    AttentionSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentAttentionSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    QkNormSpec,
    Rank,
    TensorSpec,
)

# The first row and the end.
_Rows = tuple[int, int]


def shard(spec: ModelSpec, rank: Rank, weight_format: QuantizedFormat | None = None) -> ModelSpec:
    """Returns what ``rank`` holds of the whole model ``spec``; the model itself if there is one rank.

    ``weight_format`` is the format that matrices are going to be quantized to.

    :raises InvalidArgumentError: if the model cannot be split over so many ranks.
    """
    check_count(spec, rank.count, weight_format)
    if rank.count == 1:
        return spec
    sharding = _Sharding(rank, sums_products=weight_format in QUANTIZED_BY_ROWS)
    return _without_the_rest(
        spec,
        replace(
            spec,
            num_heads=spec.num_heads // rank.count,
            num_kv_heads=max(1, spec.num_kv_heads // rank.count),
            embedding=sharding.embedding(spec.embedding),
            layers=tuple(replace(layer, branches=tuple(map(sharding.branch, layer.branches))) for layer in spec.layers),
            head=sharding.head(spec.head),
            rank=rank,
        ),
    )


def shards(spec: ModelSpec, count: int, weight_format: QuantizedFormat | None = None) -> Sequence[ModelSpec]:
    """Returns what each of ``count`` ranks holds."""
    return [shard(spec, Rank(index, count), weight_format) for index in range(count)]


def _without_the_rest(whole: ModelSpec, own: ModelSpec) -> ModelSpec:
    """Returns ``own`` with tensors that only other ranks hold among those to ignore."""
    held = {name for tensor in own.tensors() for name in tensor.names}
    others = [escape(name) for tensor in whole.tensors() for name in tensor.names if name not in held]
    return replace(own, ignored_tensors=(*own.ignored_tensors, *dict.fromkeys(others)))


class _Sharding:
    """Takes the share of ``rank`` of each part of a spec. If it ``sums_products``, maps that are split by their inputs
    end in a sum over the ranks; otherwise their branches do."""

    def __init__(self, rank: Rank, *, sums_products: bool):
        self.rank, self.sums_products = rank, sums_products

    def embedding(self, spec: EmbeddingSpec) -> EmbeddingSpec:
        # Positions that are added to tokens directly are in the sum over ranks.
        with_positions = spec.project is not None or self.rank.index == 0
        return replace(
            spec,
            tokens=self._rows(spec.tokens),
            positions=spec.positions if with_positions else None,
            sum_ranks=True,
        )

    def head(self, spec: HeadSpec) -> HeadSpec:
        weight = None if spec.weight is None else self._rows(spec.weight)
        bias = None if spec.bias is None else self._rows(spec.bias)
        return replace(spec, weight=weight, bias=bias, gather_ranks=True)

    def branch(self, spec: BranchSpec) -> BranchSpec:
        parts = tuple(replace(each, part=self._part(each.part)) for each in spec.parts)
        return replace(spec, parts=parts, sum_ranks=not self.sums_products)

    def _part(self, part: Part) -> Part:
        match part:
            case AttentionSpec():
                return self._attention(part)
            case LatentAttentionSpec():
                return replace(
                    part,
                    num_heads=part.num_heads // self.rank.count,
                    q=self._by_outputs(part.q),
                    k_up=self._by_outputs(part.k_up),
                    v_up=self._by_outputs(part.v_up),
                    output=self._by_inputs(part.output),
                )
            case MlpSpec():
                return self._mlp(part)
            case MoeSpec():
                return replace(
                    part,
                    experts=tuple(map(self._mlp, part.experts)),
                    shared=None if part.shared is None else self._mlp(part.shared),
                )

    def _attention(self, part: AttentionSpec) -> AttentionSpec:
        heads = share(part.num_heads, self.rank.index, self.rank.count)
        kv_heads = self._kv_heads(part.num_kv_heads)
        alibi = part.alibi
        return replace(
            part,
            num_heads=heads[1] - heads[0],
            num_kv_heads=kv_heads[1] - kv_heads[0],
            q=self._of_heads(part.q, heads, part.head_dim),
            k=self._of_heads(part.k, kv_heads, part.head_dim),
            v=self._of_heads(part.v, kv_heads, part.head_dim),
            output=self._by_inputs(part.output),
            q_norm=_norm_of_heads(part.q_norm, heads, part.head_dim),
            k_norm=_norm_of_heads(part.k_norm, kv_heads, part.head_dim),
            alibi=None if alibi is None else replace(alibi, slopes=alibi.slopes[slice(*heads)]),
        )

    def _kv_heads(self, num_kv_heads: int) -> _Rows:
        """Returns the KV heads of this rank: with fewer heads than ranks one that its neighbours hold too."""
        if num_kv_heads >= self.rank.count:
            return share(num_kv_heads, self.rank.index, self.rank.count)
        first = self.rank.index * num_kv_heads // self.rank.count
        return first, first + 1

    def _mlp(self, part: MlpSpec) -> MlpSpec:
        return replace(
            part,
            gate=None if part.gate is None else self._by_outputs(part.gate),
            up=self._by_outputs(part.up),
            down=self._by_inputs(part.down),
        )

    def _of_heads(self, linear: LinearSpec, heads: _Rows, head_dim: int) -> LinearSpec:
        return _linear_rows(linear, (heads[0] * head_dim, heads[1] * head_dim))

    def _by_outputs(self, linear: LinearSpec) -> LinearSpec:
        return _linear_rows(linear, share(linear.out_features, self.rank.index, self.rank.count))

    def _by_inputs(self, linear: LinearSpec) -> LinearSpec:
        columns = share(linear.in_features, self.rank.index, self.rank.count)
        return replace(
            linear,
            in_features=columns[1] - columns[0],
            weight=_piece(linear.weight, (0, linear.out_features), columns),
            bias=linear.bias if self.rank.index == 0 or self.sums_products else None,
            sum_ranks="products" if self.sums_products else "results",
        )

    def _rows(self, tensor: TensorSpec) -> TensorSpec:
        return _tensor_rows(tensor, share(tensor.shape[0], self.rank.index, self.rank.count))


def _linear_rows(linear: LinearSpec, rows: _Rows) -> LinearSpec:
    return replace(
        linear,
        out_features=rows[1] - rows[0],
        weight=_tensor_rows(linear.weight, rows),
        bias=None if linear.bias is None else _tensor_rows(linear.bias, rows),
    )


def _norm_of_heads(qk_norm: QkNormSpec | None, heads: _Rows, head_dim: int) -> QkNormSpec | None:
    if qk_norm is None:
        return None
    norm, over_all = qk_norm.norm, qk_norm.over == "all"
    features = heads[0] * head_dim, heads[1] * head_dim

    def own(tensor: TensorSpec | None) -> TensorSpec | None:
        if tensor is None or not (over_all or len(tensor.shape) == 2):
            return tensor  # all heads share it
        return _tensor_rows(tensor, features if over_all else heads)

    size = features[1] - features[0] if over_all else norm.size
    norm = replace(norm, size=size, weight=own(norm.weight), bias=own(norm.bias))
    return QkNormSpec(norm, "ranks" if over_all else qk_norm.over)


def _tensor_rows(tensor: TensorSpec, rows: _Rows) -> TensorSpec:
    return _piece(tensor, rows, *((0, size) for size in tensor.shape[1:]))


def _piece(tensor: TensorSpec, *ranges: _Rows) -> TensorSpec:
    return replace(tensor, shape=tuple(end - first for first, end in ranges), piece=ranges)
