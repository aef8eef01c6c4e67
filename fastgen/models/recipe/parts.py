"""The recipe language, typed: the parts of a layer, and what they consist of."""

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
    """A normalisation over features."""

    kind: Literal["rms", "layer"]
    """`rms` divides by the root mean square; `layer` subtracts the mean first."""
    weight: Module | None = None
    """Module that holds the norm's weight; left out only where `affine` is false."""
    bias: Expr = FALSE
    """Whether it has a bias."""
    affine: Expr = TRUE
    """Whether it has a weight (and the bias asked for)."""
    eps: Expr
    """Added to the mean square, or to the variance, under the root."""
    offset: Expr = ZERO
    """Added to the stored weight: 1 where the checkpoint keeps its difference from 1."""
    when: Expr = TRUE
    """The norm exists only where this is true."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.weight is None and not self.affine.is_constant(False):
            raise ValueError("a norm needs the name of its `weight`, or `affine: false`")
        return self


class QkNorm(Norm):
    """A normalisation of the queries or of the keys, before they are rotated."""

    over: Literal["head", "all"]
    """Over the features of each `head`, or over those of `all` heads laid together."""
    per_head_weight: Expr = FALSE
    """Whether each head has a weight of its own, stored as [heads, head_dim]; for `over: head` only."""


class QkvSplit(Section):
    """How many entries of a fused tensor's axis `part` are whose, in the order they lie in."""

    q: Expr
    """Of the queries."""
    k: Expr
    """Of the keys."""
    v: Expr
    """Of the values."""


class Qkv(Section):
    """The projections to queries, keys and values: three modules, or one that holds all of them."""

    q: Module | None = None
    """Module that makes the queries."""
    k: Module | None = None
    """Module that makes the keys."""
    v: Module | None = None
    """Module that makes the values."""
    fused: Module | None = None
    """Module that makes all three."""
    layout: LayoutPattern | None = None
    """How the matrices are stored; left out, rows of outputs. A fused one has the axis `part`."""
    split: QkvSplit | None = None
    """Whose the entries of the axis `part` are."""
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
    """How much of each head is rotated, from its first feature on; left out, all of it."""
    dim: Expr | None = None
    """How many features of each head are rotated, where that is not said as a fraction."""
    scaling: Expr = NONE
    """`rope_parameters` or `rope_scaling` of config.json, or `none`: how the frequencies are stretched."""
    trained_positions: Expr | None = None
    """The trained length, for scaling kinds that depend on it and a mapping that leaves it out; else max_positions."""
    when: Expr = TRUE
    """Rotated only where this is true."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.fraction is not None and self.dim is not None:
            raise ValueError("a rotary has a `fraction` or a `dim`, not both")
        return self


class Alibi(Section):
    """A bias on the scores that is linear in the key's position, with a slope per head."""

    rounding: Literal["float32", "bfloat16"]
    """In which dtype slope and bias are rounded."""
    scaled: bool
    """Whether the bias is multiplied by the scores' scale together with q·k."""
    when: Expr = TRUE
    """Biased only where this is true."""


class Output(Section):
    """The projection from the heads back to the stream."""

    weight: Module
    """Module that holds the matrix."""
    bias: Expr
    """Whether it has a bias."""
    layout: LayoutPattern | None = None
    """How the matrix is stored; left out, rows of outputs; `in out` is transposed."""


class Part(Section):
    """What all parts of a branch share."""

    norm: Norm | None = None
    """The part's own norm, of the branch's (normed) input."""
    when: Expr = TRUE
    """The part exists only where this is true."""


class Attention(Part):
    """Causal self-attention with grouped key and value heads."""

    qkv: Qkv
    """The projections to queries, keys and values."""
    q_norm: QkNorm | None = None
    """Norm of the queries."""
    k_norm: QkNorm | None = None
    """Norm of the keys."""
    rotary: Rotary | None = None
    """Rotary position embedding, where the model has one."""
    alibi: Alibi | None = None
    """Linear bias on the scores, where the model has one."""
    scale: Expr | None = None
    """Factor on q·k; left out, one over the root of head_dim."""
    softcap: Expr = NONE
    """Scores s become c·tanh(s / c); `none` leaves them as they are."""
    sliding_window: Expr = NONE
    """How many tokens a token sees, itself included; `none` for all before it."""
    output: Output
    """The projection from the heads back to the stream."""


class LatentQuery(Section):
    """Queries by two maps through a narrow, normed middle."""

    rank: Expr
    """Features in the middle."""
    down: Module
    """Module that narrows."""
    norm: Norm
    """Norm of the middle."""
    up: Module
    """Module that makes the queries."""
    when: Expr = TRUE
    """So only where this is true."""


class Query(Section):
    """Queries by one map."""

    weight: Module
    """Module that makes the queries."""
    when: Expr = TRUE
    """So only where this is true."""


class KvSplit(Section):
    """How many entries of the axis `part` are whose, in the order they lie in."""

    k: Expr
    """Of the keys."""
    v: Expr
    """Of the values."""


class LatentKeysValues(Section):
    """Keys and values of a latent vector, which is what the cache holds."""

    rank: Expr
    """Features of the latent vector."""
    down: Module
    """Module that makes the latent vector and after it the rotated key that all heads share."""
    norm: Norm
    """Norm of the latent vector."""
    fused: Module
    """Module that makes keys and values of the latent vector."""
    layout: LayoutPattern
    """How its matrix is stored, with an axis `part`."""
    split: KvSplit
    """Whose the entries of the axis `part` are."""

    @model_validator(mode="after")
    def _has_part(self) -> Self:
        if "part" not in self.layout.names:
            raise ValueError("the `layout` needs an axis `part`, which `split` divides")
        return self


class LatentAttention(Part):
    """Multi-head latent attention: keys and values of all heads are made of one narrow vector a token."""

    nope_dim: Expr
    """Features of a query or key head that are not rotated, the first ones."""
    rope_dim: Expr
    """Features of a query or key head that are rotated, the last ones."""
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
    """Factor on q·k; left out, one over the root of nope_dim + rope_dim."""
    output: Output
    """The projection from the heads back to the stream."""


class GateUpSplit(Section):
    """How many entries of the axis `part` are whose, in the order they lie in."""

    gate: Expr
    """Of the gate."""
    up: Expr
    """Of up."""


class FeedForward(Section):
    """`plain` is down(act(up(x))), `gated` is down(act(gate(x)) * up(x))."""

    kind: Literal["plain", "gated"]
    """Whether there is a gate."""
    size: Expr
    """Features between up and down."""
    activation: Expr
    """Name of the activation, such as config.json's hidden_act, or a quoted text."""
    gate: Module | None = None
    """Module that makes the gate, where the kind is gated."""
    up: Module | None = None
    """Module that widens."""
    fused: Module | None = None
    """Module that makes both gate and up."""
    split: GateUpSplit | None = None
    """Whose the entries of the fused tensor's axis `part` are."""
    down: Module
    """Module that narrows back to the stream."""
    layout: LayoutPattern | None = None
    """How the matrices are stored, or the fused one alone; left out, rows of outputs; `in out` is transposed."""
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
    """The experts of a mixture, all alike."""

    at: ExpertPrefix
    """Prefix of an expert's tensors; {expert} stands for its index."""
    count: Expr
    """How many experts there are."""


class Shared(FeedForward):
    """The expert that every token goes to."""

    when: Expr = TRUE
    """It exists only where this is true."""


class Router(Section):
    """Which experts a token goes to, and with what weights."""

    weight: Module
    """Module that makes a logit for each expert."""
    top_k: Expr
    """Experts a token goes to."""
    scoring: Literal["softmax", "softmax_top_k", "sigmoid"]
    """Scores from logits: `softmax` over all experts, `softmax_top_k` over the chosen ones, `sigmoid` of each."""
    normalize: Expr
    """Whether the chosen weights are divided by their sum."""
    scale: Expr = ONE
    """Factor on the chosen weights."""
    correction: Module | None = None
    """Tensor (its whole name) that is added to the scores for choosing only."""
    num_groups: Expr = ONE
    """Groups the experts are in."""
    top_groups: Expr | None = None
    """Groups that are chosen from; left out, all."""


class Moe(Part):
    """A mixture of experts: the weighted sum of the chosen experts', and of the shared one's, outputs."""

    router: Router
    """Which experts a token goes to, and with what weights."""
    experts: Experts
    """The experts."""
    shared: Shared | None = None
    """The expert that every token goes to."""
    shared_gate: Module | None = None
    """Module that makes the weight of the shared expert, by a sigmoid."""

    @model_validator(mode="after")
    def _gate_of_something(self) -> Self:
        if self.shared_gate is not None and self.shared is None:
            raise ValueError("a `shared_gate` needs a `shared` expert")
        return self


def _check_fused(section: Qkv | FeedForward, names: tuple[str, ...]) -> None:
    """Refuses anything but a module for each of ``names``, or one for all, with layout and split."""
    given = [name for name in names if getattr(section, name) is not None]
    listed = ", ".join(f"`{name}`" for name in names)
    if section.fused is None and len(given) < len(names):
        missing = next(name for name in names if name not in given)
        raise ValueError(f"needs a `{missing}`: a module for each of {listed}, or `fused` for all of them")
    if section.fused is None:
        if section.split is not None or (section.layout is not None and "part" in section.layout.names):
            raise ValueError("`split`, and an axis `part` of the `layout`, are for a `fused` module")
    elif given:
        raise ValueError(f"`fused` stands for {listed}, so `{given[0]}` cannot be given beside it")
    elif section.layout is None or section.split is None:
        raise ValueError("a `fused` module needs a `layout` and a `split`")
    elif "part" not in section.layout.names:
        raise ValueError("the `layout` needs an axis `part`, which `split` divides")
