"""The specs of a layer: norms, attentions, feed-forward parts, and the branches that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastgen.models.spec.tensors import LinearSpec, NodeRef, TensorSpec


@dataclass(frozen=True)
class NormSpec:
    """RMS or layer norm over the last axis, which has ``size`` features. A missing ``weight`` or ``bias`` is ``None``.

    ``offset`` is added to the stored weight (1 if the checkpoint stores the difference from 1).
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
    """Norm of queries or keys before rotation: ``over`` each ``head`` of ``D`` features, ``all`` heads concatenated, or
    the heads of all ``ranks`` concatenated.

    Per head, the weight is ``[D]``, shared by the heads, or ``[heads, D]``; over all heads it is ``[heads * D]``, and
    over ranks that of the rank's own heads.
    """

    norm: NormSpec
    over: Literal["head", "all", "ranks"]


@dataclass(frozen=True)
class RotaryScaling:
    """The stretching of rotary frequencies beyond the trained length; see :mod:`fastgen.models.frequencies`.

    ``original_max_positions`` is the length that the model was trained on before stretching. ``attention_factor``
    multiplies cos and sin. Fields that a kind does not use keep their defaults.
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

    ``rounding`` is the dtype to which slope and product are rounded, because some models were trained so. If
    ``scaled``, the bias is multiplied by the scale of the scores together with q·k.
    """

    slopes: tuple[float, ...]
    rounding: Literal["float32", "bfloat16"]
    scaled: bool
    node: NodeRef


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention. ``scale`` multiplies q·k; a token sees ``sliding_window`` tokens, itself included.

    A ``softcap`` of ``c`` turns each scaled score into ``c * tanh(score / c)``.
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
        """Returns how many numbers a token takes in the cache: its keys and values."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): the cache holds one latent vector a token instead of heads.

    A query head has ``nope_dim`` features without rotation and ``rope_dim`` with it; a value head has ``v_head_dim``.
    ``q`` is one map ``H -> N * (nope + rope)``, or the second of two maps after ``q_down`` and ``q_norm``. ``kv_down``
    makes ``kv_rank + rope_dim`` features: the latent, which ``kv_norm`` normalizes, and the rotated key that all heads
    share. ``k_up [N * nope, kv_rank]`` and ``v_up [N * v_head_dim, kv_rank]`` make keys and values from the latent.
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
        """Returns how many numbers a token takes in the cache: the latent vector and the rotated key."""
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
    """The router of a mixture: it chooses ``top_k`` experts for each token, and their weights.

    ``scoring`` turns router logits ``[T, E]`` into scores: ``softmax`` over all experts, ``softmax_top_k`` over the
    chosen ones only, ``sigmoid`` of each. ``correction`` ``[E]`` is added to the scores for the choice only. With
    ``num_groups`` groups of experts, the experts are chosen from the ``top_groups`` best groups. A group's score is its
    best score, or with a correction the sum of its two best. ``normalize`` divides the chosen weights by their sum;
    ``scale`` multiplies them.
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
    """A mixture of experts: a token's output is the weighted sum of its experts' outputs plus the shared expert's.

    All ``experts`` have the same size. ``shared_gate`` ``[1, H]`` weights the shared expert by a sigmoid.
    """

    router: RouterSpec
    experts: tuple[MlpSpec, ...]
    shared: MlpSpec | None
    shared_gate: LinearSpec | None
    node: NodeRef


@dataclass(frozen=True)
class PartSpec:
    """One part of a branch; ``norm`` is the part's own norm, applied to the (normalized) input of the branch."""

    norm: NormSpec | None
    part: AttentionSpec | LatentAttentionSpec | MlpSpec | MoeSpec


@dataclass(frozen=True)
class BranchSpec:
    """``x = sum_norm(x + scale * output_norm(part1(norm(x)) + part2(norm(x)) …))``; any norm may be absent.

    Two parts in one branch run in parallel on the same input. With ``sum_ranks`` each rank has a share of the parts'
    sum, and the shares are summed over the ranks before ``output_norm``. Without it each rank has all of the sum.
    """

    name: str
    norm: NormSpec | None
    parts: tuple[PartSpec, ...]
    output_norm: NormSpec | None
    scale: float
    sum_norm: NormSpec | None
    node: NodeRef
    sum_ranks: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One layer: its branches, in order."""

    index: int
    branches: tuple[BranchSpec, ...]
