"""The schema of the parts of a layer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from fastgen.models.recipe.values import (
    FALSE,
    NONE,
    ONE,
    TRUE,
    ZERO,
    ExpertPrefix,
    Expr,
    LayoutPattern,
    Module,
    Section,
)


class Norm(Section):
    """A normalization over features."""

    kind: Literal["rms", "layer"]
    """`rms` divides by the root mean square; `layer` subtracts the mean first."""
    weight: Module | None = None
    """Module of the norm's weight; may be left out only if `affine` is false."""
    bias: Expr = FALSE
    """Whether it has a bias."""
    affine: Expr = TRUE
    """Whether it has a weight, and a bias if `bias` is true."""
    eps: Expr
    """Added to the mean square or to the variance, under the root."""
    offset: Expr = ZERO
    """Added to the stored weight: 1 if the checkpoint stores the difference from 1."""
    when: Expr = TRUE
    """The norm exists only if this is true."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.weight is None and not self.affine.is_constant(False):
            raise ValueError("a norm needs a `weight`, or `affine: false`")
        return self


class QkNorm(Norm):
    """A normalization of the queries or of the keys, before they are rotated."""

    over: Literal["head", "all"]
    """Over the features of each `head`, or over the features of `all` heads together."""
    per_head_weight: Expr = FALSE
    """Whether each head has its own weight, stored as [heads, head_dim]; only for `over: head`."""


class QkvSplit(Section):
    """Numbers of entries on a fused tensor's axis `part`, in the order in which they are stored."""

    q: Expr
    """Entries of the queries."""
    k: Expr
    """Entries of the keys."""
    v: Expr
    """Entries of the values."""


class Qkv(Section):
    """The projections to queries, keys and values: three modules, or one fused module."""

    q: Module | None = None
    """Module of the queries."""
    k: Module | None = None
    """Module of the keys."""
    v: Module | None = None
    """Module of the values."""
    fused: Module | None = None
    """Module of all three."""
    layout: LayoutPattern | None = None
    """How the matrices are stored; by default as rows of outputs. A fused one has the axis `part`."""
    split: QkvSplit | None = None
    """How the axis `part` is divided."""
    bias: Expr
    """Whether they have biases."""

    @model_validator(mode="after")
    def _one_or_three(self) -> Self:
        _check_fused(self, ("q", "k", "v"))
        return self


class Rotary(Section):
    """Rotary position embedding of queries and keys."""

    kind: Literal["half", "interleaved"] = "half"
    """Feature i is rotated against i + dim/2 (`half`), or 2i against 2i + 1 (`interleaved`)."""
    theta: Expr
    """Base of the frequencies."""
    fraction: Expr | None = None
    """Fraction of each head that is rotated, from its first feature on; by default all of it."""
    dim: Expr | None = None
    """Number of features of each head that are rotated, as an alternative to `fraction`."""
    scaling: Expr = NONE
    """`rope_parameters` or `rope_scaling` of config.json, or `none`: how the frequencies are stretched."""
    trained_positions: Expr | None = None
    """The trained length, for scaling kinds that need it if the mapping does not state it; by default max_positions."""
    when: Expr = TRUE
    """Rotated only if this is true."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.fraction is not None and self.dim is not None:
            raise ValueError("a rotary has a `fraction` or a `dim`, not both")
        return self


class Alibi(Section):
    """A bias on the scores that is linear in the key's position, with a slope per head."""

    rounding: Literal["float32", "bfloat16"]
    """Dtype to which slope and bias are rounded."""
    scaled: bool
    """Whether the bias is multiplied by the scale of the scores together with q·k."""
    when: Expr = TRUE
    """Biased only if this is true."""


class Output(Section):
    """The projection from the heads back to the stream."""

    weight: Module
    """Module of the matrix."""
    bias: Expr
    """Whether it has a bias."""
    layout: LayoutPattern | None = None
    """How the matrix is stored; by default as rows of outputs; `in out` is transposed."""


class Part(Section):
    """The keys that all parts of a branch share."""

    norm: Norm | None = None
    """The part's own norm, of the (normalized) input of the branch."""
    when: Expr = TRUE
    """The part exists only if this is true."""


class Attention(Part):
    """Causal self-attention with grouped key and value heads."""

    qkv: Qkv
    """The projections to queries, keys and values."""
    q_norm: QkNorm | None = None
    """Norm of the queries."""
    k_norm: QkNorm | None = None
    """Norm of the keys."""
    rotary: Rotary | None = None
    """Rotary position embedding, if the model has one."""
    alibi: Alibi | None = None
    """Linear bias on the scores, if the model has one."""
    scale: Expr | None = None
    """Factor on q·k; by default 1 / sqrt(head_dim)."""
    softcap: Expr = NONE
    """Scores s become c·tanh(s / c); `none` leaves them unchanged."""
    sliding_window: Expr = NONE
    """Number of tokens that a token sees, itself included; `none` for all before it."""
    output: Output
    """The projection from the heads back to the stream."""


class LatentQuery(Section):
    """Queries by two maps through a narrow, normalized vector."""

    rank: Expr
    """Features of the narrow vector."""
    down: Module
    """Module that makes the narrow vector."""
    norm: Norm
    """Norm of the narrow vector."""
    up: Module
    """Module that makes the queries."""
    when: Expr = TRUE
    """Used only if this is true."""


class Query(Section):
    """Queries by one map."""

    weight: Module
    """Module that makes the queries."""
    when: Expr = TRUE
    """Used only if this is true."""


class KvSplit(Section):
    """Numbers of entries on the axis `part`, in the order in which they are stored."""

    k: Expr
    """Entries of the keys."""
    v: Expr
    """Entries of the values."""


class LatentKeysValues(Section):
    """Keys and values from a latent vector, which the cache holds."""

    rank: Expr
    """Features of the latent vector."""
    down: Module
    """Module that makes the latent vector, followed by the rotated key that all heads share."""
    norm: Norm
    """Norm of the latent vector."""
    fused: Module
    """Module that makes keys and values from the latent vector."""
    layout: LayoutPattern
    """How its matrix is stored, with an axis `part`."""
    split: KvSplit
    """How the axis `part` is divided."""

    @model_validator(mode="after")
    def _has_part(self) -> Self:
        if "part" not in self.layout.names:
            raise ValueError("the `layout` needs an axis `part`, which `split` divides")
        return self


class LatentAttention(Part):
    """Multi-head latent attention: keys and values of all heads are made from one narrow vector per token."""

    nope_dim: Expr
    """Features of a query or key head that are not rotated; they come first."""
    rope_dim: Expr
    """Features of a query or key head that are rotated; they come last."""
    v_head_dim: Expr
    """Features of a value head."""
    q: Query | None = None
    """Queries by one map."""
    q_latent: LatentQuery | None = None
    """Queries by two maps; exactly one of the two is present."""
    kv_latent: LatentKeysValues
    """Keys and values."""
    bias: Expr
    """Whether the narrowing maps have biases."""
    rotary: Rotary
    """Rotary position embedding."""
    scale: Expr | None = None
    """Factor on q·k; by default 1 / sqrt(nope_dim + rope_dim)."""
    output: Output
    """The projection from the heads back to the stream."""


class GateUpSplit(Section):
    """Numbers of entries on the axis `part`, in the order in which they are stored."""

    gate: Expr
    """Entries of the gate."""
    up: Expr
    """Entries of up."""


class FeedForward(Section):
    """`plain` is down(act(up(x))), `gated` is down(act(gate(x)) * up(x))."""

    kind: Literal["plain", "gated"]
    """Whether there is a gate."""
    size: Expr
    """Features between up and down."""
    activation: Expr
    """Name of the activation: a key of config.json such as hidden_act, or a quoted text."""
    gate: Module | None = None
    """Module of the gate, if the kind is gated."""
    up: Module | None = None
    """Module of up, from the stream to the wide vector."""
    fused: Module | None = None
    """Module of both gate and up."""
    split: GateUpSplit | None = None
    """How the fused tensor's axis `part` is divided."""
    down: Module
    """Module of down, back to the stream."""
    layout: LayoutPattern | None = None
    """How the matrices, or only the fused one, are stored; by default as rows of outputs; `in out` is transposed."""
    bias: Expr
    """Whether all of them have biases."""

    @model_validator(mode="after")
    def _gate_fits(self) -> Self:
        if self.kind == "gated":
            _check_fused(self, ("gate", "up"))
        elif self.gate or self.fused or self.split:
            raise ValueError("a plain mlp has no `gate`")
        elif self.up is None:
            raise ValueError("a plain mlp needs the module `up`")
        elif self.layout is not None and "part" in self.layout.names:
            raise ValueError("the axis `part` of the `layout` is for a `fused` module")
        return self


class Mlp(FeedForward, Part):
    """The feed-forward part: `plain` is down(act(up(x))), `gated` is down(act(gate(x)) * up(x))."""


class Experts(FeedForward):
    """The experts of a mixture, all with the same structure."""

    at: ExpertPrefix
    """Prefix of an expert's tensors; {expert} stands for its index."""
    count: Expr
    """Number of experts."""


class Shared(FeedForward):
    """The expert that every token goes to."""

    when: Expr = TRUE
    """It exists only if this is true."""


class Router(Section):
    """Chooses the experts of a token, and their weights."""

    weight: Module
    """Module that makes a logit for each expert."""
    top_k: Expr
    """Number of experts for each token."""
    scoring: Literal["softmax", "softmax_top_k", "sigmoid"]
    """Scores from logits: `softmax` over all experts, `softmax_top_k` over the chosen ones, `sigmoid` of each."""
    normalize: Expr
    """Whether the chosen weights are divided by their sum."""
    scale: Expr = ONE
    """Factor on the chosen weights."""
    correction: Module | None = None
    """Tensor (its full name) that is added to the scores for the choice only."""
    num_groups: Expr = ONE
    """Number of groups of experts."""
    top_groups: Expr | None = None
    """Number of groups that experts are chosen from; by default all."""


class Moe(Part):
    """A mixture of experts: the weighted sum of the outputs of the chosen experts, plus that of the shared one."""

    router: Router
    """Chooses the experts of a token, and their weights."""
    experts: Experts
    """The experts."""
    shared: Shared | None = None
    """The expert that every token goes to."""
    shared_gate: Module | None = None
    """Module that makes the weight of the shared expert, through a sigmoid."""

    @model_validator(mode="after")
    def _gate_of_something(self) -> Self:
        if self.shared_gate is not None and self.shared is None:
            raise ValueError("a `shared_gate` needs a `shared` expert")
        return self


def _check_fused(section: Qkv | FeedForward, names: tuple[str, ...]) -> None:
    """Refuses anything other than a module for each of ``names``, or one for all, with layout and split."""
    given = [name for name in names if getattr(section, name) is not None]
    listed = ", ".join(f"`{name}`" for name in names)
    if section.fused is None and len(given) < len(names):
        missing = next(name for name in names if name not in given)
        raise ValueError(f"needs a `{missing}`: a module for each of {listed}, or `fused` for all of them")
    if section.fused is None:
        if section.split is not None or (section.layout is not None and "part" in section.layout.names):
            raise ValueError("`split`, and an axis `part` of the `layout`, are for a `fused` module")
    elif given:
        raise ValueError(f"`fused` contains {listed}, so `{given[0]}` cannot be given too")
    elif section.layout is None or section.split is None:
        raise ValueError("a `fused` module needs a `layout` and a `split`")
    elif "part" not in section.layout.names:
        raise ValueError("the `layout` needs an axis `part`, which `split` divides")
