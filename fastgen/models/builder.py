"""From a model spec to modules with empty parameters, and the list of where each checkpoint tensor goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fastgen.compile.backends.target import TORCH, Target
from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.compile.ops.add.reference import scaled_add
from fastgen.compile.ops.attention.reference import Alibi
from fastgen.compile.ops.experts.cpp import GroupedLinearKernel
from fastgen.compile.ops.linear.cpp import LinearKernel, linear_spec
from fastgen.compile.spec import dtype_name
from fastgen.compile.weights.formats import QuantizedFormat, WeightOnlyFormat
from fastgen.compile.weights.packed import WeightFormat, matrix_format
from fastgen.errors import RecipeError
from fastgen.layers.attention import Attention
from fastgen.layers.embedding import Embedding, EmbeddingTable
from fastgen.layers.head import Head
from fastgen.layers.kv_cache import KVShape
from fastgen.layers.latent_attention import HeadLinear, LatentAttention, QueryDown
from fastgen.layers.linear import Linear, Rows
from fastgen.layers.mlp import Activation, GatedMlp, Mlp
from fastgen.layers.moe import GroupedLinear, Moe, Router
from fastgen.layers.norm import LayerNorm, Norm, QkNorm, RMSNorm
from fastgen.layers.residual import DeferredAdd, Stream
from fastgen.layers.rotary import Rotary
from fastgen.models.causal_lm import Branch, CausalLM, Layer, Module, Part
from fastgen.models.checkpoint.checkpoint import WeightSlot
from fastgen.models.frequencies import inverse_frequencies
from fastgen.models.layer_kernels import LayerKernels, unless_one
from fastgen.models.layer_kernels_triton import TritonLayerKernels
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
    NodeRef,
    NormSpec,
    PartSpec,
    QkNormSpec,
    RotarySpec,
    RouterSpec,
    TensorSpec,
)
from fastgen.models.weight_sizes import whole_numel

_ROUNDING = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    block_size: int = 16,
    target: Target = TORCH,
    weight_format: QuantizedFormat | None = None,
) -> tuple[CausalLM, list[WeightSlot]]:
    """The model with uninitialised parameters on ``device``, and one slot for each tensor of ``spec.tensors()``.

    ``max_model_len`` is how many positions the rotary tables hold, ``block_size`` the tokens of a KV block. The layers
    ask ``target`` for their kernels, and run once it has built them. ``weight_format`` is what matrices are kept in,
    one of those that the target multiplies; by default as ``dtype`` says.
    """
    builder = _Builder(spec, dtype, device, max_model_len, block_size, target, weight_format)
    return builder.model(), builder.slots


def kv_groups(spec: ModelSpec) -> list[int]:
    """The KV group of each attention: those with the same window and KV shape share one (and so a block table)."""
    kinds = [(_window(attention), _kv_shape(attention)) for attention in spec.attentions()]
    distinct = list(dict.fromkeys(kinds))
    return [distinct.index(kind) for kind in kinds]


def kv_shapes(spec: ModelSpec) -> list[KVShape]:
    """What a token leaves in the cache of a layer, by KV group."""
    by_group = dict(zip(kv_groups(spec), map(_kv_shape, spec.attentions()), strict=True))
    return list(by_group.values())


def kv_windows(spec: ModelSpec) -> list[int | None]:
    """How many positions a token sees in each KV group, its own included; ``None`` for all."""
    by_group = dict(zip(kv_groups(spec), map(_window, spec.attentions()), strict=True))
    return list(by_group.values())


def _window(attention: AttentionSpec | LatentAttentionSpec) -> int | None:
    return attention.sliding_window if isinstance(attention, AttentionSpec) else None


def _kv_shape(attention: AttentionSpec | LatentAttentionSpec) -> KVShape:
    if isinstance(attention, AttentionSpec):
        return KVShape(attention.num_kv_heads, attention.head_dim)
    return KVShape(1, attention.kv_rank + attention.rope_dim, attention.kv_rank)


def _error(message: str, node: NodeRef) -> RecipeError:
    return RecipeError(message, file=node.file, line=node.line, node=node.path)


@dataclass
class _Builder:
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    block_size: int
    target: Target
    weight_format: QuantizedFormat | None
    slots: list[WeightSlot] = field(default_factory=list)
    rotaries: dict[tuple[object, ...], Rotary] = field(default_factory=dict)
    linear_kernels: dict[WeightFormat, LinearKernel] = field(default_factory=dict)
    routed_kernel: GroupedLinearKernel | None = None
    num_attentions: int = 0
    # What the next reader of the stream has to add to it first, where kernels compute.
    unsettled: DeferredAdd | None = None

    def __post_init__(self) -> None:
        self.activation_dtype = self.target.activation_dtype(self.dtype)
        self.cpp = self.triton = self.weight_only = None
        if self.target.name == "cpp":
            self.cpp = LayerKernels(self.target, self.dtype, self.block_size, self.spec.recipe)
        elif self.target.name == "triton":
            sizes = (self.target, self.dtype, self.device, self.block_size, self.spec.recipe)
            numel = whole_numel(self.spec) if self.weight_format else 0
            self.triton = TritonLayerKernels(*sizes, torch.empty(numel, dtype=self.dtype, device=self.device))
        self.kernels = self.cpp or self.triton
        if self.cpp is None:
            self.weight_only = cast(WeightOnlyFormat | None, self.weight_format)
        plain = matrix_format(self.plain_format, self.target.arch) if self.cpp else self.plain_format
        self.matrix_format = cast(WeightFormat, self.weight_format or plain)
        self.max_in_features = max(tensor.shape[1] for tensor in self.spec.tensors() if len(tensor.shape) == 2)

    @property
    def plain_format(self) -> WeightFormat:
        return cast(WeightFormat, dtype_name(self.dtype))

    def linear_kernel(self, node: NodeRef, *, exact: bool = False) -> LinearKernel | None:
        """For the layer at ``node``: all of a format share one and its workspace. ``exact`` is never quantised."""
        if self.cpp is None:
            return None
        weight_format = self.plain_format if exact else self.matrix_format
        kernel = self.target.kernel(linear_spec(weight_format, self.target.arch, needed_by=self.cpp.asking(node)))
        if weight_format not in self.linear_kernels:
            launches = LinearKernel(kernel, self.target.max_rows, self.max_in_features, self.device)
            self.linear_kernels[weight_format] = launches
        return self.linear_kernels[weight_format]

    def expert_kernel(self, node: NodeRef) -> GroupedLinearKernel | None:
        """For the experts at ``node``, as for those of all layers; a token is a row for each that it chooses."""
        if self.cpp is None:
            return None
        asking = self.cpp.asking(node)
        kernel = self.target.kernel(linear_spec(self.matrix_format, self.target.arch, routed=True, needed_by=asking))
        if self.routed_kernel is None:
            choices = max(part.router.top_k for part in self.spec.parts() if isinstance(part, MoeSpec))
            self.routed_kernel = GroupedLinearKernel(
                kernel, self.target.max_rows * choices, self.max_in_features, self.device
            )
        return self.routed_kernel

    def model(self) -> CausalLM:
        spec = self.spec
        embedding = self.embedding(spec.embedding)
        return CausalLM(
            embedding,
            [Layer([self.branch(branch) for branch in layer.branches]) for layer in spec.layers],
            self.stream_norm(spec.final_norm),
            self.head(spec.head, embedding.tokens),
            self.triton.plans.values() if self.triton else (),
        )

    def embedding(self, spec: EmbeddingSpec) -> Embedding:
        positions, scale = spec.positions, unless_one(torch.tensor(spec.scale, dtype=self.dtype).item())
        tokens = self.table(spec.tokens, is_head=self.spec.head.weight is None)
        return Embedding(
            tokens,
            scale=scale,
            project=self.linear([spec.project]) if spec.project else None,
            positions=self.table(positions.weight) if positions else None,
            position_offset=positions.offset if positions else 0,
            norm=self.norm(spec.norm),
            kernels=self.kernels.embedding_kernels(spec, tokens, scale) if self.kernels else None,
        )

    def head(self, spec: HeadSpec, tokens: EmbeddingTable) -> Head:
        table = tokens if spec.weight is None else self.table(spec.weight, is_head=True)
        head = Head(
            table,
            project=self.linear([spec.project]) if spec.project else None,
            biased=spec.bias is not None,
            scale=unless_one(spec.scale),
            softcap=spec.softcap,
            softcap_kernel=self.kernels.softcap_kernel(spec) if self.kernels and spec.softcap is not None else None,
            plain_kernel=self.triton.head_kernel(table, spec.node) if self.triton else None,
            device=self.device,
        )
        self.claim(spec.bias, head.bias_slot)
        return head

    def branch(self, spec: BranchSpec) -> Branch:
        norm = self.stream_norm(spec.norm) if spec.norm else None
        parts = [self.part(part, reads_stream=norm is None) for part in spec.parts]
        output_norm = self.norm(spec.output_norm)
        scale = unless_one(spec.scale)
        add: Callable[[Tensor, Tensor], Stream] = partial(scaled_add, scale=scale)
        if self.kernels:
            add = self.unsettled = DeferredAdd(scale, spec.node)
        add_part = self.kernels.add_kernel(None, spec.node) if self.kernels and len(parts) > 1 else scaled_add
        sum_norm = self.stream_norm(spec.sum_norm) if spec.sum_norm else None
        return Branch(norm, parts, output_norm=output_norm, sum_norm=sum_norm, add=add, add_part=add_part)

    def part(self, spec: PartSpec, *, reads_stream: bool) -> Part:
        norm = self.stream_norm(spec.norm) if reads_stream else self.norm(spec.norm)
        module: Module
        match spec.part:
            case AttentionSpec() as part:
                module = self.attention(part)
            case LatentAttentionSpec() as part:
                module = self.latent_attention(part)
            case MlpSpec() as part:
                module = self.mlp(part)
            case MoeSpec() as part:
                module = self.moe(part)
        return Part(norm, module)

    def attention(self, spec: AttentionSpec) -> Attention:
        return Attention(
            self.linear([spec.q, spec.k, spec.v]),
            self.linear([spec.output]),
            kv_layer=self.next_kv_layer(),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            rotary=self.rotary(spec.rotary) if spec.rotary else None,
            sliding_window=spec.sliding_window,
            q_norm=self.qk_norm(spec.q_norm) if spec.q_norm else None,
            k_norm=self.qk_norm(spec.k_norm) if spec.k_norm else None,
            alibi=(alibi := self.alibi(spec.alibi) if spec.alibi else None),
            softcap=spec.softcap,
            kernels=self.kernels.attention_kernels(spec, alibi) if self.kernels else None,
        )

    def latent_attention(self, spec: LatentAttentionSpec) -> LatentAttention:
        kv_norm = self.norm(spec.kv_norm, in_kernel=True)
        assert kv_norm is not None
        for up in (spec.k_up, spec.v_up):
            if up.bias is not None:
                raise _error("keys and values are made of the latent without a bias", up.node)
        return LatentAttention(
            QueryDown(self.linear([spec.q_down]), self.norm(spec.q_norm)) if spec.q_down else None,
            self.linear([spec.q]),
            self.linear([spec.kv_down]),
            kv_norm,
            self.head_linear(spec.k_up, spec.num_heads, turned=True),
            self.head_linear(spec.v_up, spec.num_heads, turned=False),
            self.linear([spec.output]),
            self.rotary(spec.rotary),
            kv_layer=self.next_kv_layer(),
            num_heads=spec.num_heads,
            nope_dim=spec.nope_dim,
            rope_dim=spec.rope_dim,
            scale=spec.scale,
            kernels=self.kernels.latent_kernels(spec) if self.kernels else None,
        )

    def head_linear(self, spec: LinearSpec, num_heads: int, *, turned: bool) -> HeadLinear:
        linear = HeadLinear(
            num_heads,
            (spec.out_features, spec.in_features),
            turned=turned,
            dtype=self.dtype,
            device=self.device,
            kernel=self.linear_kernel(spec.node, exact=True),
        )
        self.claim(spec.weight, linear.slot)
        return linear

    def next_kv_layer(self) -> int:
        """Attentions are built in the order of ``spec.attentions()``, and so are the layers of the KV cache."""
        self.num_attentions += 1
        return self.num_attentions - 1

    def alibi(self, spec: AlibiSpec) -> Alibi:
        slopes = torch.tensor(spec.slopes, dtype=_ROUNDING[spec.rounding], device=self.device)
        return Alibi(slopes, spec.scaled)

    def mlp(self, spec: MlpSpec) -> Mlp | GatedMlp:
        activation = self.activation(spec)
        if spec.gate is None:
            return Mlp(self.linear([spec.up]), self.linear([spec.down]), activation)
        return GatedMlp(self.linear([spec.gate, spec.up]), self.linear([spec.down]), activation)

    def activation(self, spec: MlpSpec) -> Activation:
        if spec.activation not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            node = spec.activation_node or spec.node
            said = f"; the recipe says `{node.text}`" if node.text else ""
            raise _error(f"activation {spec.activation!r} is not known; known are {known}{said}", node)
        kernel = self.kernels.activation_kernel(spec) if self.kernels else None
        return Activation(spec.activation, gated=spec.gate is not None, kernel=kernel)

    def moe(self, spec: MoeSpec) -> Moe:
        router = self.router(spec.router)
        first = spec.experts[0]
        return Moe(
            router,
            self.grouped([[each.gate, each.up] if each.gate else [each.up] for each in spec.experts]),
            self.grouped([[each.down] for each in spec.experts]),
            self.activation(first),
            shared=self.mlp(spec.shared) if spec.shared else None,
            shared_gate=self.linear([spec.shared_gate]) if spec.shared_gate else None,
            kernels=self.kernels.moe_kernels(spec) if self.kernels else None,
        )

    def router(self, spec: RouterSpec) -> Router:
        linear = self.linear([spec.weight], exact=True)
        router = Router(
            linear,
            top_k=spec.top_k,
            scoring=spec.scoring,
            normalize=spec.normalize,
            corrected=spec.correction is not None,
            scale=unless_one(spec.scale),
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            device=self.device,
            kernel=self.kernels.route_kernel(spec) if self.kernels else None,
        )
        self.claim(spec.correction, router.correction)
        return router

    def rotary(self, spec: RotarySpec) -> Rotary:
        key = (spec.theta, spec.dim, spec.scaling, spec.kind)
        if key not in self.rotaries:
            self.rotaries[key] = Rotary(
                inverse_frequencies(spec),
                attention_factor=spec.scaling.attention_factor if spec.scaling else 1.0,
                max_positions=self.max_model_len,
                device=self.device,
                interleaved=spec.kind == "interleaved",
            )
        return self.rotaries[key]

    def qk_norm(self, spec: QkNormSpec) -> QkNorm:
        norm = self.norm(spec.norm, in_kernel=True)
        assert norm is not None
        return QkNorm(norm, over_all=spec.over == "all")

    def stream_norm(self, spec: NormSpec | None) -> Norm | None:
        """The norm with which something reads the residual stream; without one it reads the stream itself."""
        added, self.unsettled = self.unsettled, None
        if spec is None and added is not None:
            assert self.kernels
            added.kernel = self.kernels.add_kernel(added.scale, added.node)
        return self.norm(spec, added=added)

    def norm(self, spec: NormSpec | None, *, in_kernel: bool = False, added: DeferredAdd | None = None) -> Norm | None:
        """``in_kernel``: computed by a kernel of the attention, where there are some."""
        if spec is None:
            return None
        kind = RMSNorm if spec.kind == "rms" else LayerNorm
        norm = kind(
            spec.weight.shape if spec.weight else (spec.size,),
            spec.eps,
            weight=spec.weight is not None,
            bias=spec.bias is not None,
            offset=spec.offset,
            dtype=self.activation_dtype,
            device=self.device,
            kernel=self.kernels.norm_kernel(spec) if self.kernels and not in_kernel and added is None else None,
            adding_kernel=self.kernels.norm_kernel(spec, added) if self.kernels and added else None,
        )
        self.claim(spec.weight, norm.weight)
        self.claim(spec.bias, norm.bias)
        return norm

    def linear(self, parts: Sequence[LinearSpec], *, exact: bool = False) -> Linear:
        """``exact`` is for what must not be rounded: never quantised, and where kernels compute, in fp32."""
        weight_format, out_dtype = (None, "fp32") if exact else (self.weight_only, "")
        linear = Linear(
            parts[0].in_features,
            [part.out_features for part in parts],
            [part.bias is not None for part in parts],
            dtype=self.dtype,
            device=self.device,
            kernel=self.linear_kernel(parts[0].node, exact=exact),
            plain_kernel=self.triton.linear_kernel(parts, weight_format, out_dtype) if self.triton else None,
            weight_format=weight_format,
        )
        for index, part in enumerate(parts):
            weight, bias = linear.part(index)
            self.claim(part.weight, weight)
            self.claim(part.bias, bias)
        return linear

    def grouped(self, experts: Sequence[Sequence[LinearSpec]]) -> GroupedLinear:
        """The same parts of every expert, as one layer."""
        parts = experts[0]
        grouped = GroupedLinear(
            len(experts),
            parts[0].in_features,
            [part.out_features for part in parts],
            [part.bias is not None for part in parts],
            dtype=self.dtype,
            device=self.device,
            kernel=self.expert_kernel(parts[0].node),
        )
        for expert, its_parts in enumerate(experts):
            for index, part in enumerate(its_parts):
                weight, bias = grouped.part(expert, index)
                self.claim(part.weight, weight)
                self.claim(part.bias, bias)
        return grouped

    def table(self, tensor: TensorSpec, *, is_head: bool = False) -> EmbeddingTable:
        table = EmbeddingTable(
            *tensor.shape,
            dtype=self.dtype,
            device=self.device,
            kernel=self.linear_kernel(tensor.node) if is_head else None,
            weight_format=self.weight_only if is_head else None,
        )
        self.claim(tensor, table.slot)
        return table

    def claim(self, tensor: TensorSpec | None, target: torch.Tensor | Rows | None) -> None:
        if tensor is not None:
            assert target is not None
            self.slots.append(WeightSlot(tensor, target.data if isinstance(target, torch.nn.Parameter) else target))
