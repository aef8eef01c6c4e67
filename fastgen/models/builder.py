"""Builds modules with empty parameters from a model spec, and lists where each tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from fastgen.compile.backends.backend import Backend
from fastgen.compile.backends.modules.collectives import HeadsOfRank, RankNorm
from fastgen.compile.backends.modules.stored import NormParameters
from fastgen.compile.backends.ops import AllReduceOp, LinearAddNormOp, LinearOp, NormOp, NormWeights, Table
from fastgen.compile.backends.reference import REFERENCE
from fastgen.compile.backends.shapes import FeatureNorm
from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.compile.ops.attention.reference import Alibi
from fastgen.compile.weights.formats import QuantizedFormat
from fastgen.compile.weights.rows import Rows
from fastgen.layers.attention import Attention
from fastgen.layers.embedding import Embedding
from fastgen.layers.head import Head
from fastgen.layers.kv_cache import KVShape
from fastgen.layers.latent_attention import LatentAttention, QueryDown
from fastgen.layers.mlp import Mlp
from fastgen.layers.moe import Moe
from fastgen.layers.residual import FlushAndNorm, FlushStream, LeftToReader, Reader, ReadStream
from fastgen.layers.rotary import Rotary
from fastgen.models.causal_lm import Branch, CausalLM, Layer, Module, Part
from fastgen.models.checkpoint.weights import WeightSlot
from fastgen.models.frequencies import inverse_frequencies
from fastgen.models.shapes import Shapes, inward_parts, kv_shape, model_shape, rotary_shape, unless_one
from fastgen.models.spec import (
    AlibiSpec,
    AttentionSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentAttentionSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PartSpec,
    RotarySpec,
    TensorSpec,
)

_ROUNDING = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_T = TypeVar("_T")


def build(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    block_size: int = 16,
    backend: Backend = REFERENCE,
    weight_format: QuantizedFormat | None = None,
) -> tuple[CausalLM, list[WeightSlot]]:
    """Returns the model with uninitialised parameters on ``device``, and one slot for each tensor of
    ``spec.tensors()``.

    ``max_model_len`` is how many positions the rotary tables hold, ``block_size`` the tokens of a KV block. Layers run
    once the ``backend``, which makes their ops, has built its kernels. ``weight_format`` is the format of matrices, one
    that the backend multiplies; by default ``dtype``.
    """
    builder = _Builder(spec, dtype, device, max_model_len, block_size, backend, weight_format)
    return builder.model(), builder.slots


def kv_groups(spec: ModelSpec) -> list[int]:
    """Returns the KV group of each attention. Those with the same window and KV shape share a group and its block
    table.
    """
    kinds = [(_window(attention), kv_shape(attention)) for attention in spec.attentions()]
    distinct = list(dict.fromkeys(kinds))
    return [distinct.index(kind) for kind in kinds]


def kv_shapes(spec: ModelSpec) -> list[KVShape]:
    """Returns the shape of a token's entry in a layer's cache, by KV group."""
    return _by_group(spec, kv_shape)


def kv_windows(spec: ModelSpec) -> list[int | None]:
    """Returns how many positions a token sees, its own included, by KV group; ``None`` for all."""
    return _by_group(spec, _window)


def _by_group(spec: ModelSpec, of: Callable[[AttentionSpec | LatentAttentionSpec], _T]) -> list[_T]:
    return list(dict(zip(kv_groups(spec), map(of, spec.attentions()), strict=True)).values())


def _window(attention: AttentionSpec | LatentAttentionSpec) -> int | None:
    return attention.sliding_window if isinstance(attention, AttentionSpec) else None


@dataclass
class _Builder:
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    block_size: int
    backend: Backend
    weight_format: QuantizedFormat | None
    slots: list[WeightSlot] = field(default_factory=list)
    rotaries: dict[tuple[object, ...], Rotary] = field(default_factory=dict)
    num_attentions: int = 0
    # The sum that is pending on the stream at this place of the model.
    pending: _PendingAdd | None = None

    def __post_init__(self) -> None:
        shared = model_shape(
            self.spec, self.dtype, self.device, self.block_size, self.max_model_len, self.weight_format
        )
        self.ops = self.backend.ops(shared)
        self.shapes = Shapes(self.spec.recipe, self.dtype, self.block_size)

    def model(self) -> CausalLM:
        spec = self.spec
        tokens = self.table(spec.embedding.tokens, multiplies=spec.head.weight is None)
        behind = iter(self.norms_behind())
        return CausalLM(
            self.embedding(spec.embedding, tokens),
            [Layer([self.branch(branch, next(behind)) for branch in layer.branches]) for layer in spec.layers],
            self.read(spec.final_norm),
            self.head(spec.head, tokens),
            self.ops,
        )

    def norms_behind(self) -> list[FeatureNorm | None]:
        """Returns the norm by which the stream is read behind each branch; ``None`` where it is read as it is."""
        branches = [branch for layer in self.spec.layers for branch in layer.branches]
        last = self.spec.final_norm
        following = [*map(self.first_norm, branches[1:]), self.shapes.norm(last) if last else None]
        return [
            self.shapes.norm(branch.sum_norm) if branch.sum_norm else norm
            for branch, norm in zip(branches, following, strict=True)
        ]

    def first_norm(self, branch: BranchSpec) -> FeatureNorm | None:
        """Returns the norm by which a branch, or its first part, reads the stream, if there is one."""
        if branch.norm is not None:
            return self.shapes.norm(branch.norm, feeds_matrices=_all_are_matrices(branch))
        part = branch.parts[0]
        return self.shapes.norm(part.norm, feeds_matrices=_is_matrices(part)) if part.norm else None

    def embedding(self, spec: EmbeddingSpec, tokens: Table) -> Embedding:
        project = self.linear([spec.project]) if spec.project else None
        positions = self.table(spec.positions.weight) if spec.positions else None
        offset = spec.positions.offset if spec.positions else 0
        positions_needed_by = self.shapes.needed_by(spec.positions.node) if spec.positions else ()
        norm = self.norm(spec.norm) if spec.norm else None
        look_up = self.ops.embedding(
            tokens,
            scale=unless_one(torch.tensor(spec.scale, dtype=self.dtype).item()),
            positions=positions if project is None else None,
            offset=offset,
            first_id=spec.tokens.piece[0][0] if spec.tokens.piece else None,
            needed_by=self.shapes.needed_by(spec.node),
            positions_needed_by=positions_needed_by,
        )
        added = None
        if project is not None and positions is not None:
            added = self.ops.positions(positions, offset, needed_by=positions_needed_by)
        sum_ranks = self.sum_ranks() if spec.sum_ranks else None
        return Embedding(look_up, sum_ranks=sum_ranks, project=project, positions=added, norm=norm)

    def head(self, spec: HeadSpec, tokens: Table) -> Head:
        table = tokens if spec.weight is None else self.table(spec.weight, multiplies=True)
        project = self.linear([spec.project]) if spec.project else None
        logits = self.ops.head(table, self.shapes.head(spec))
        self.claim(spec.bias, logits.bias_slot)
        gather = self.backend.gather(self.spec.rank.count) if spec.gather_ranks else None
        return Head(logits, project=project, gather_ranks=gather, vocab_size=self.spec.vocab_size)

    def sum_ranks(self) -> AllReduceOp:
        """Returns the sum of activations over the ranks."""
        return self.backend.all_reduce(self.spec.rank.count, self.backend.activation_dtype(self.dtype))

    def branch(self, spec: BranchSpec, norm_behind: FeatureNorm | None) -> Branch:
        """Returns a branch, whose sum the stream's next reader norms by ``norm_behind`` if there is one."""
        read = self.read(spec.norm, feeds_matrices=_all_are_matrices(spec)) if spec.norm else None
        left = self.left_to_reader(spec, norm_behind)
        parts = [self.part(part, left, reads_stream=read is None) for part in spec.parts]
        output_norm = self.norm(spec.output_norm) if spec.output_norm and left is None else None
        self.pending = _PendingAdd(unless_one(spec.scale), self.shapes.needed_by(spec.node), left)
        return Branch(
            read,
            parts,
            add_part=self.ops.add(needed_by=self.pending.needed_by) if len(parts) > 1 else None,
            sum_ranks=self.sum_ranks() if spec.sum_ranks else None,
            output_norm=output_norm,
            read_sum=self.read(spec.sum_norm) if spec.sum_norm else None,
        )

    def left_to_reader(self, spec: BranchSpec, norm: FeatureNorm | None) -> LinearAddNormOp | None:
        """Returns the last linear layer of a branch with the sum and the norm that follow; ``None`` where something
        stands between them."""
        if norm is None or len(spec.parts) > 1 or spec.sum_ranks:
            return None
        output_norm = self.shapes.norm(spec.output_norm) if spec.output_norm else None
        match spec.parts[0].part:
            case AttentionSpec(output=last) | LatentAttentionSpec(output=last) | MlpSpec(down=last):
                linear = self.shapes.linear([last])
                left = self.ops.linear_add_norm(linear, norm, unless_one(spec.scale), output_norm=output_norm)
                self.claim_linear([last], left.linear)
                if spec.output_norm is not None and left.output_norm is not None:
                    self.claim_norm(spec.output_norm, left.output_norm)
                return left
        return None

    def part(self, spec: PartSpec, left: LinearAddNormOp | None, *, reads_stream: bool) -> Part:
        """Returns a part of a branch, whose last linear layer is ``left`` to the stream's next reader."""
        last = None if left is None else LeftToReader(left)
        feeds_matrices = _is_matrices(spec)
        if reads_stream:
            read = self.read(spec.norm, feeds_matrices=feeds_matrices)
        else:
            read = ReadStream(self.norm(spec.norm, feeds_matrices=feeds_matrices) if spec.norm else None)
        module: Module
        match spec.part:
            case AttentionSpec() as part:
                module = self.attention(part, last)
            case LatentAttentionSpec() as part:
                module = self.latent_attention(part, last)
            case MlpSpec() as part:
                module = self.mlp(part, last)
            case MoeSpec() as part:
                module = self.moe(part)
        return Part(read, module)

    def read(self, norm: NormSpec | None, *, feeds_matrices: bool = False) -> Reader:
        """Returns what reads the residual stream here, after adding what is pending on it."""
        pending, self.pending = self.pending, None
        if pending is None:
            return ReadStream(self.norm(norm, feeds_matrices=feeds_matrices) if norm else None)
        if norm is None:
            assert pending.left is None, "a linear layer is left to a reader without a norm"
            return FlushStream(self.ops.add(pending.scale, needed_by=pending.needed_by))
        shape = self.shapes.norm(norm, feeds_matrices=feeds_matrices)
        add_norm = pending.left or self.ops.add_norm(shape, pending.scale)
        self.claim_norm(norm, add_norm.norm)
        return FlushAndNorm(add_norm)

    def attention(self, spec: AttentionSpec, output: LinearOp | None) -> Attention:
        of_ranks = [norm for norm in (spec.q_norm, spec.k_norm) if norm is not None and norm.over == "ranks"]
        q_norm, k_norm = (None if norm in of_ranks else norm for norm in (spec.q_norm, spec.k_norm))
        projected = [spec.q, spec.k, spec.v]
        attend = self.ops.projected_attention(
            self.shapes.linear(projected),
            self.shapes.attention(spec),
            rotary=rotary_shape(spec.rotary) if spec.rotary else None,
            q_norm=self.shapes.qk_norm(q_norm),
            k_norm=self.shapes.qk_norm(k_norm),
            alibi=self.alibi(spec.alibi) if spec.alibi else None,
            between=self.rank_norm(spec) if of_ranks else None,
            needed_by=self.shapes.needed_by(spec.q.node),
        )
        self.claim_linear(projected, attend.qkv)
        for qk_norm, weights in ((q_norm, attend.q_norm), (k_norm, attend.k_norm)):
            if qk_norm is not None and weights is not None:
                self.claim_norm(qk_norm.norm, weights)
        rotary = self.rotary(spec.rotary) if spec.rotary else None
        output = output or self.linear([spec.output])
        return Attention(attend, output, kv_layer=self.next_kv_layer(), rotary=rotary)

    def rank_norm(self, spec: AttentionSpec) -> RankNorm:
        """Returns the norms of queries and keys over the heads of all ranks."""
        norms, first = [], 0
        dtype = self.backend.activation_dtype(self.dtype)
        for qk_norm, linear in ((spec.q_norm, spec.q), (spec.k_norm, spec.k)):
            end = first + linear.out_features
            if qk_norm is not None and qk_norm.over == "ranks":
                norm = self.shapes.norm(qk_norm.norm)
                stored = NormParameters(norm.shape, weight=norm.weight, bias=norm.bias, dtype=dtype, device=self.device)
                self.claim_norm(qk_norm.norm, stored)
                norms.append(HeadsOfRank(first, end, norm.eps, norm.offset, stored))
            first = end
        return self.backend.rank_norm(norms, self.spec.rank.count)

    def latent_attention(self, spec: LatentAttentionSpec, output: LinearOp | None) -> LatentAttention:
        for up in (spec.k_up, spec.v_up):
            if up.bias is not None:
                raise up.node.error("keys and values are made of the latent without a bias")
        q_down = None
        if spec.q_down:
            norm = self.norm(spec.q_norm, feeds_matrices=True) if spec.q_norm else None
            q_down = QueryDown(self.linear([spec.q_down]), norm)
        q, kv_down = self.linear([spec.q]), self.linear([spec.kv_down])
        attend = self.ops.latent_attention(self.shapes.latent_attention(spec))
        self.claim_norm(spec.kv_norm, attend.kv_norm)
        self.claim(spec.k_up.weight, attend.k_up.slot)
        self.claim(spec.v_up.weight, attend.v_up.slot)
        return LatentAttention(
            q_down,
            q,
            kv_down,
            attend,
            output or self.linear([spec.output]),
            self.rotary(spec.rotary),
            kv_layer=self.next_kv_layer(),
            num_heads=spec.num_heads,
        )

    def next_kv_layer(self) -> int:
        """Returns the next layer of the KV cache. Attentions are built in the order of ``spec.attentions()``."""
        self.num_attentions += 1
        return self.num_attentions - 1

    def alibi(self, spec: AlibiSpec) -> Alibi:
        slopes = torch.tensor(spec.slopes, dtype=_ROUNDING[spec.rounding], device=self.device)
        return Alibi(slopes, spec.scaled)

    def mlp(self, spec: MlpSpec, down: LinearOp | None = None) -> Mlp:
        _check_activation(spec)
        parts = inward_parts(spec)
        # Ranks that sum integer products read the activation themselves, for the largest number of whole rows.
        activation = self.shapes.activation(spec, feeds_matrices=spec.down.sum_ranks != "products")
        inward = self.ops.activated_linear(self.shapes.linear(parts), activation)
        self.claim_linear(parts, inward)
        return Mlp(inward, down or self.linear([spec.down]))

    def moe(self, spec: MoeSpec) -> Moe:
        _check_activation(spec.experts[0])
        router = self.ops.router(self.shapes.router(spec.router))
        self.claim_linear([spec.router.weight], router.linear)
        self.claim(spec.router.correction, router.correction)
        experts = self.ops.experts(self.shapes.experts(spec))
        for index, each in enumerate(spec.experts):
            for place, part in enumerate(inward_parts(each)):
                self.claim_part(part, experts.inward_part(index, place))
        for index, each in enumerate(spec.experts):
            self.claim_part(each.down, experts.down_part(index))
        return Moe(
            router,
            experts,
            shared=self.mlp(spec.shared) if spec.shared else None,
            shared_gate=self.linear([spec.shared_gate]) if spec.shared_gate else None,
        )

    def rotary(self, spec: RotarySpec) -> Rotary:
        key = (spec.theta, spec.dim, spec.scaling, spec.kind)
        if key not in self.rotaries:
            self.rotaries[key] = Rotary(
                inverse_frequencies(spec),
                attention_factor=spec.scaling.attention_factor if spec.scaling else 1.0,
                max_positions=self.max_model_len,
                device=self.device,
            )
        return self.rotaries[key]

    def norm(self, spec: NormSpec, *, feeds_matrices: bool = False) -> NormOp:
        norm = self.ops.norm(self.shapes.norm(spec, feeds_matrices=feeds_matrices))
        self.claim_norm(spec, norm)
        return norm

    def linear(self, parts: Sequence[LinearSpec]) -> LinearOp:
        linear = self.ops.linear(self.shapes.linear(parts))
        self.claim_linear(parts, linear)
        return linear

    def table(self, tensor: TensorSpec, *, multiplies: bool = False) -> Table:
        table = self.ops.table(self.shapes.table(tensor, multiplies=multiplies))
        self.claim(tensor, table.slot)
        return table

    def claim_norm(self, spec: NormSpec, norm: NormWeights) -> None:
        self.claim(spec.weight, norm.weight)
        self.claim(spec.bias, norm.bias)

    def claim_linear(self, parts: Sequence[LinearSpec], linear: LinearOp) -> None:
        for index, part in enumerate(parts):
            self.claim_part(part, linear.part(index))

    def claim_part(self, part: LinearSpec, place: tuple[torch.Tensor | Rows, torch.Tensor | None]) -> None:
        weight, bias = place
        self.claim(part.weight, weight)
        self.claim(part.bias, bias)

    def claim(self, tensor: TensorSpec | None, place: torch.Tensor | Rows | None) -> None:
        """Has the checkpoint's ``tensor`` written to ``place``."""
        if tensor is not None:
            assert place is not None
            self.slots.append(WeightSlot(tensor, place.data if isinstance(place, torch.nn.Parameter) else place))


class _PendingAdd(NamedTuple):
    scale: float | None
    needed_by: tuple[str, ...]
    # The linear layer that the next reader computes, with what it does then.
    left: LinearAddNormOp | None


def _is_matrices(part: PartSpec) -> bool:
    """Returns whether nothing of this part reads its input but linear layers whose weights may be quantized."""
    return not isinstance(part.part, MoeSpec)


def _all_are_matrices(branch: BranchSpec) -> bool:
    """Returns whether that holds for all parts of a branch, which read its norm directly."""
    return all(part.norm is None and _is_matrices(part) for part in branch.parts)


def _check_activation(spec: MlpSpec) -> None:
    """Raises :class:`RecipeError` for an activation that is not known."""
    if spec.activation not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        node = spec.activation_node or spec.node
        written = f"; the recipe says `{node.text}`" if node.text else ""
        raise node.error(f"activation {spec.activation!r} is not known; known are {known}{written}")
