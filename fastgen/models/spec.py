"""A model spec: a recipe resolved against one checkpoint's ``config.json``, with every number known.

Pure data. Everything that can be told before a weight is read follows from it: the tensors and their shapes, the
parameter count, KV bytes per token, FLOPs per token. The builder turns it into modules.

Shape letters: ``H`` hidden, ``N`` query heads, ``K`` KV heads, ``D`` head size, ``F`` feed-forward, ``V`` vocabulary,
``L`` layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Literal


@dataclass(frozen=True)
class NodeRef:
    """Where in a recipe something was asked for: dotted path, file and 1-based line; ``text`` is the value there."""

    path: str
    file: str
    line: int
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.path}"


@dataclass(frozen=True)
class Layout:
    """How a stored tensor is read into a parameter of ``[rows]`` or ``[rows, in]``.

    ``pattern`` is the left side of an einops pattern that names the stored axes, such as
    ``"(num_kv_heads part head_dim) in"``. ``in`` is the input axis and goes last; all others, in the order they stand
    in, make the rows. ``sizes`` gives the size of every name. Of the axis ``part``, where there is one, only the
    entries ``part[0] .. part[1] - 1`` are taken: the tensor is shared by several parameters.
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...]
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class TensorSpec:
    """A parameter's tensor in the checkpoint. ``names[0]`` is its own name; the others are spellings it may also have.

    ``shape`` is what the parameter has; ``stored_shape`` what the file has, which differs where there is a ``layout``.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    node: NodeRef
    layout: Layout | None = None
    stored_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.stored_shape:
            object.__setattr__(self, "stored_shape", self.shape)


@dataclass(frozen=True)
class LinearSpec:
    """``y = x Wᵀ (+ b)`` with ``W [out_features, in_features]``."""

    weight: TensorSpec
    bias: TensorSpec | None
    in_features: int
    out_features: int
    node: NodeRef


@dataclass(frozen=True)
class NormSpec:
    """RMS or layer norm over the last axis, of ``size`` features; a ``weight`` or ``bias`` it lacks is ``None``.

    ``offset`` is added to the stored weight (1 where a checkpoint keeps the difference from 1).
    """

    kind: Literal["rms", "layer"]
    size: int
    eps: float
    weight: TensorSpec | None
    bias: TensorSpec | None
    node: NodeRef
    offset: float = 0.0


@dataclass(frozen=True)
class QkNormSpec:
    """Norm of queries or keys before rotation: ``over`` each ``head`` of ``D`` features, or ``all`` laid together.

    Per head, its weight is ``[D]``, shared by the heads, or ``[heads, D]``; over all, ``[heads * D]``.
    """

    norm: NormSpec
    over: Literal["head", "all"]


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary frequencies are stretched beyond the trained length; see :mod:`fastgen.models.frequencies`.

    ``original_max_positions`` is the length the model was trained on before stretching. ``attention_factor`` multiplies
    cos and sin. Fields a kind does not use keep their defaults.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float
    original_max_positions: int
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class RotarySpec:
    """Rotary position embedding of the first ``dim`` features of each head.

    ``half``: feature ``i`` is rotated against ``i + dim/2``; ``interleaved``: ``2i`` against ``2i + 1``.
    """

    theta: float
    dim: int
    scaling: RotaryScaling | None
    node: NodeRef
    kind: Literal["half", "interleaved"] = "half"


@dataclass(frozen=True)
class AlibiSpec:
    """A bias on the scores, linear in the key's position (Press et al., 2022): ``slopes[head] * key_position``.

    ``rounding`` names the dtype in which slope and product are rounded, as some models were trained;
    ``scaled`` says that the bias is multiplied by the scores' scale together with q·k.
    """

    slopes: tuple[float, ...]
    rounding: Literal["float32", "bfloat16"]
    scaled: bool
    node: NodeRef


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention. ``scale`` multiplies q·k; a token sees ``sliding_window`` tokens, itself included.

    ``softcap`` ``c`` makes ``c * tanh(score / c)`` of each scaled score.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    output: LinearSpec
    rotary: RotarySpec | None
    sliding_window: int | None
    node: NodeRef
    q_norm: QkNormSpec | None = None
    k_norm: QkNormSpec | None = None
    alibi: AlibiSpec | None = None
    softcap: float | None = None

    @property
    def cached_features(self) -> int:
        """Numbers that a token leaves in the cache: its keys and values."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): the cache holds one latent vector a token instead of heads.

    A query head has ``nope_dim`` features without and ``rope_dim`` with rotation, a value head ``v_head_dim``. ``q`` is
    one map ``H -> N * (nope + rope)``, or with ``q_down`` and ``q_norm`` two through ``q_rank``. ``kv_down`` makes
    ``kv_rank + rope_dim`` features: the latent, normed by ``kv_norm``, and the rotated key all heads share. ``k_up``
    and ``v_up`` ``[N * nope, kv_rank]``, ``[N * v_head_dim, kv_rank]`` make keys and values of the latent.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    kv_rank: int
    scale: float
    q_down: LinearSpec | None
    q_norm: NormSpec | None
    q: LinearSpec
    kv_down: LinearSpec
    kv_norm: NormSpec
    k_up: LinearSpec
    v_up: LinearSpec
    output: LinearSpec
    rotary: RotarySpec
    node: NodeRef

    @property
    def cached_features(self) -> int:
        """Numbers that a token leaves in the cache: the latent vector and the rotated key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class MlpSpec:
    """``down(act(up(x)))``, or gated: ``down(act(gate(x)) * up(x))``."""

    kind: Literal["plain", "gated"]
    activation: str
    gate: LinearSpec | None
    up: LinearSpec
    down: LinearSpec
    node: NodeRef
    activation_node: NodeRef | None = None


@dataclass(frozen=True)
class RouterSpec:
    """Which ``top_k`` of the experts a token goes to, and with what weights.

    ``scoring`` turns router logits ``[T, E]`` into scores: ``softmax`` over all experts, ``softmax_top_k`` over the
    chosen ones only, ``sigmoid`` of each. ``correction`` ``[E]`` is added to the scores for choosing only. With
    ``num_groups`` groups of experts, only the ``top_groups`` best are chosen from (a group's score: the sum of its two
    best with a correction, else its best). ``normalize`` divides the chosen weights by their sum; ``scale`` multiplies
    them.
    """

    weight: LinearSpec
    top_k: int
    scoring: Literal["softmax", "softmax_top_k", "sigmoid"]
    normalize: bool
    scale: float
    correction: TensorSpec | None
    num_groups: int
    top_groups: int
    node: NodeRef


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts: each token's output is the weighted sum of its experts', plus the shared expert's.

    ``experts`` are alike in size. ``shared_gate`` ``[1, H]`` weighs the shared expert by a sigmoid.
    """

    router: RouterSpec
    experts: tuple[MlpSpec, ...]
    shared: MlpSpec | None
    shared_gate: LinearSpec | None
    node: NodeRef


@dataclass(frozen=True)
class PartSpec:
    """One part of a branch; ``norm`` is its own, applied to the branch's (normed) input."""

    norm: NormSpec | None
    part: AttentionSpec | LatentAttentionSpec | MlpSpec | MoeSpec


@dataclass(frozen=True)
class BranchSpec:
    """``x = sum_norm(x + scale * output_norm(part1(norm(x)) + part2(norm(x)) …))``; any norm may be absent.

    Two parts in one branch run in parallel on the same input.
    """

    name: str
    norm: NormSpec | None
    parts: tuple[PartSpec, ...]
    output_norm: NormSpec | None
    scale: float
    sum_norm: NormSpec | None
    node: NodeRef


@dataclass(frozen=True)
class LayerSpec:
    index: int
    branches: tuple[BranchSpec, ...]


@dataclass(frozen=True)
class PositionsSpec:
    """Learned positions: row ``position + offset`` of ``weight [num_rows, H]`` is added to the token's embedding."""

    weight: TensorSpec
    offset: int
    node: NodeRef


@dataclass(frozen=True)
class EmbeddingSpec:
    """Token embedding ``[V, E]`` times ``scale`` (rounded to the model's dtype), an optional projection ``E -> H``,
    optional learned positions added after it, an optional norm last."""

    tokens: TensorSpec
    project: LinearSpec | None
    positions: PositionsSpec | None
    node: NodeRef
    scale: float = 1.0
    norm: NormSpec | None = None


@dataclass(frozen=True)
class HeadSpec:
    """Logits from the final hidden state. ``weight`` is ``None`` where the head is the token embedding (tied).

    ``logits = softcap(scale * (hidden Wᵀ + bias))``.
    """

    weight: TensorSpec | None
    project: LinearSpec | None
    node: NodeRef
    bias: TensorSpec | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A whole model. ``max_positions`` is ``None`` for architectures without a limit."""

    recipe: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int | None
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    head: HeadSpec
    # Glob patterns of checkpoint tensors that carry nothing the model needs.
    ignored_tensors: tuple[str, ...]

    @property
    def tied(self) -> bool:
        return self.head.weight is None

    def tensors(self) -> Iterator[TensorSpec]:
        """Every parameter's tensor, once, in load order: embedding, layers, final norm, head.

        A tensor of the checkpoint that several parameters share comes once for each of them.
        """
        return tensors_of((self.embedding, self.layers, self.final_norm, self.head))

    @property
    def num_parameters(self) -> int:
        """Learned numbers, a tied head counted once."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors())

    def parts(self) -> Iterator[AttentionSpec | LatentAttentionSpec | MlpSpec | MoeSpec]:
        """The parts of all layers, in order."""
        return (each.part for layer in self.layers for branch in layer.branches for each in branch.parts)

    def attentions(self) -> Iterator[AttentionSpec | LatentAttentionSpec]:
        """The attentions of all layers, in order."""
        return (part for part in self.parts() if isinstance(part, AttentionSpec | LatentAttentionSpec))

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes that one token leaves in the cache, all layers together."""
        return dtype_bytes * sum(part.cached_features for part in self.attentions())

    def flops_per_token(self, context: int) -> int:
        """Floating-point operations of the forward pass of one token that sees ``context`` tokens, itself included.

        Matrix products only, two operations per multiply-add: all linear maps (of the experts those the token goes
        to), the head, and q·k and p·v over the context (or the window, where that is shorter). Looking up an embedding
        is no arithmetic; norms, activations and softmax are left out. A latent attention works on what is cached: each
        query goes through the keys' map instead of each key, and each output through the values'.
        """
        operations = 2 * math.prod((self.head.weight or self.embedding.tokens).shape)
        for linear in _linears((self.embedding, self.layers, self.head)):
            operations += 2 * linear.in_features * linear.out_features
        for part in self.parts():
            if isinstance(part, MoeSpec):
                idle = part.experts[part.router.top_k :]  # they are alike
                operations -= sum(2 * linear.in_features * linear.out_features for linear in _linears(idle))
            elif isinstance(part, LatentAttentionSpec):
                operations += 2 * part.num_heads * (2 * part.kv_rank + part.rope_dim) * context
            elif isinstance(part, AttentionSpec):
                seen = context if part.sliding_window is None else min(context, part.sliding_window)
                operations += 4 * part.num_heads * part.head_dim * seen
        return operations


def tensors_of(node: object) -> Iterator[TensorSpec]:
    """The tensors at and below a spec (or in a tuple of specs), in the order of its fields."""
    if isinstance(node, TensorSpec):
        yield node
    else:
        for child in _children(node):
            yield from tensors_of(child)


def _linears(node: object) -> Iterator[LinearSpec]:
    if isinstance(node, LinearSpec):
        yield node
    else:
        for child in _children(node):
            yield from _linears(child)


def _children(node: object) -> Iterator[object]:
    if isinstance(node, tuple):
        yield from node
    elif is_dataclass(node):
        yield from (getattr(node, each.name) for each in fields(node))
