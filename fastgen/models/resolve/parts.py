"""Resolves the parts of a layer: norms, attentions, feed-forwards and mixtures of experts."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from fastgen.models.recipe import parts as schema
from fastgen.models.recipe.layout import Axes
from fastgen.models.resolve.place import Place, Tensors
from fastgen.models.resolve.rope_config import RopeConfigError, rotary_scaling
from fastgen.models.spec import (
    AlibiSpec,
    AttentionSpec,
    LatentAttentionSpec,
    LinearSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    QkNormSpec,
    RotaryScaling,
    RotarySpec,
    RouterSpec,
    TensorSpec,
)

MAX_EXPERTS: Final = 4096
MAX_EXPERTS_IN_ALL: Final = 2**16


@dataclass(frozen=True)
class Numbers:
    """The values of the recipe's ``config:``. Expressions in the model tree look up these names first."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int | None


class Parts:
    """Makes the specs of the parts of a layer, with at most ``most_experts`` experts of a mixture.

    ``axes`` maps the names that a layout may use to their sizes.
    """

    def __init__(
        self, numbers: Numbers, defined: Mapping[str, object], tensors: Tensors, *, most_experts: int = MAX_EXPERTS
    ):
        self.numbers, self.tensors, self.most_experts = numbers, tensors, most_experts
        named = {each.name: getattr(numbers, each.name) for each in fields(numbers)} | dict(defined)
        self.axes = {
            name: value
            for name, value in named.items()
            if isinstance(value, int) and not isinstance(value, bool) and value > 0
        }

    # ------------------------------------------------------------------------------------------------------ norms

    def norm(self, norm: schema.Norm | None, at: Place, size: int | None = None) -> NormSpec | None:
        """Resolves a norm over ``size`` features, by default over those of the stream."""
        if norm is None or not (at / "when").flag(norm.when):
            return None
        size = self.numbers.hidden_size if size is None else size
        return self._norm(norm, at, size, (size,))

    def qk_norm(self, norm: schema.QkNorm | None, at: Place, num_heads: int) -> QkNormSpec | None:
        if norm is None or not (at / "when").flag(norm.when):
            return None
        size = self.numbers.head_dim * (num_heads if norm.over == "all" else 1)
        if not (at / "per_head_weight").flag(norm.per_head_weight):
            return QkNormSpec(self._norm(norm, at, size, (size,)), norm.over)
        if norm.over == "all":
            raise (at / "per_head_weight").error("a norm over all heads has one weight for all of them")
        return QkNormSpec(self._norm(norm, at, size, (num_heads, size)), norm.over)

    def _norm(self, norm: schema.Norm, at: Place, size: int, shape: tuple[int, ...]) -> NormSpec:
        eps = (at / "eps").number(norm.eps)
        if eps < 0:
            raise (at / "eps").error(f"must not be negative, but is {eps:g}")
        weight = bias = None
        if (at / "affine").flag(norm.affine):
            weight = self.tensors.tensor(at / "weight", f"{norm.weight}.weight", shape)
            if (at / "bias").flag(norm.bias):
                bias = self.tensors.tensor(at / "bias", f"{norm.weight}.bias", shape)
        return NormSpec(norm.kind, size, eps, weight, bias, at.ref(), offset=(at / "offset").number(norm.offset))

    # -------------------------------------------------------------------------------------------------- attention

    def attention(self, attention: schema.Attention, at: Place) -> AttentionSpec:
        numbers = self.numbers
        q, k, v = self.qkv(attention.qkv, at / "qkv")
        return AttentionSpec(
            num_heads=numbers.num_heads,
            num_kv_heads=numbers.num_kv_heads,
            head_dim=numbers.head_dim,
            scale=numbers.head_dim**-0.5 if attention.scale is None else (at / "scale").factor(attention.scale),
            q=q,
            k=k,
            v=v,
            output=self.output(attention.output, at / "output", numbers.num_heads * numbers.head_dim),
            rotary=self.rotary(attention.rotary, at / "rotary", numbers.head_dim),
            sliding_window=(at / "sliding_window").optional_size(attention.sliding_window),
            node=at.ref(),
            q_norm=self.qk_norm(attention.q_norm, at / "q_norm", numbers.num_heads),
            k_norm=self.qk_norm(attention.k_norm, at / "k_norm", numbers.num_kv_heads),
            alibi=self.alibi(attention.alibi, at / "alibi"),
            softcap=(at / "softcap").optional_cap(attention.softcap),
        )

    def qkv(self, qkv: schema.Qkv, at: Place) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        numbers, bias = self.numbers, (at / "bias").flag(qkv.bias)
        kv_size = numbers.num_kv_heads * numbers.head_dim
        rows = {"q": numbers.num_heads * numbers.head_dim, "k": kv_size, "v": kv_size}
        if qkv.fused is None:
            linears = {
                name: self.linear(at / name, getattr(qkv, name), bias, numbers.hidden_size, size, qkv.layout)
                for name, size in rows.items()
            }
        else:
            assert qkv.layout is not None  # the schema requires both
            assert qkv.split is not None
            split = self.split(qkv.split, at / "split")
            linears = self.tensors.fused(
                at, qkv.fused, bias, numbers.hidden_size, rows, layout=qkv.layout, split=split, sizes=self.axes
            )
        return linears["q"], linears["k"], linears["v"]

    def split(self, split: schema.QkvSplit | schema.KvSplit | schema.GateUpSplit, at: Place) -> dict[str, int]:
        """Returns the number of entries of the axis ``part`` for each name, in the order of the recipe."""
        order = at.keys()
        return {name: (at / name).size(getattr(split, name)) for name in order}

    def output(self, output: schema.Output, at: Place, in_features: int) -> LinearSpec:
        bias = (at / "bias").flag(output.bias)
        return self.linear(at, output.weight, bias, in_features, self.numbers.hidden_size, output.layout)

    def rotary(self, rotary: schema.Rotary | None, at: Place, width: int) -> RotarySpec | None:
        """Resolves the rotation of vectors of ``width`` features."""
        if rotary is None or not (at / "when").flag(rotary.when):
            return None
        theta = (at / "theta").number(rotary.theta)
        if theta <= 1:
            raise (at / "theta").error(f"must be above 1, but is {theta:g}")
        dim, fraction = width, 1.0
        if rotary.dim is not None:
            dim = (at / "dim").size(rotary.dim, most=width)
            fraction = dim / width
        elif rotary.fraction is not None:
            fraction = (at / "fraction").number(rotary.fraction)
            dim = int(width * fraction)
            if not 0 < fraction <= 1:
                raise (at / "fraction").error(f"must be above 0 and at most 1, but is {fraction:g}")
            if dim == 0:
                raise (at / "fraction").error(f"{fraction:g} of {width} features is less than one, so none is rotated")
        if dim % 2:
            rotated = f"head_dim is {dim}" if dim == width else f"{dim} of the {width} features of a head are rotated"
            raise at.error(f"rotation works on pairs of features, but {rotated}, an odd number")
        return RotarySpec(theta, dim, self.scaling(rotary, at, fraction), at.ref(), kind=rotary.kind)

    def scaling(self, rotary: schema.Rotary, at: Place, fraction: float) -> RotaryScaling | None:
        trained = self.numbers.max_positions
        if rotary.trained_positions is not None:
            trained = (at / "trained_positions").optional_size(rotary.trained_positions)
        mapping = (at / "scaling").value(rotary.scaling)
        try:
            return rotary_scaling(mapping, trained_positions=trained, fraction=fraction)
        except RopeConfigError as error:
            raise (at / "scaling").error(f"{at.scope.config_file}: {error}") from None

    def alibi(self, alibi: schema.Alibi | None, at: Place) -> AlibiSpec | None:
        if alibi is None or not (at / "when").flag(alibi.when):
            return None
        return AlibiSpec(alibi_slopes(self.numbers.num_heads), alibi.rounding, alibi.scaled, at.ref())

    def latent_attention(self, attention: schema.LatentAttention, at: Place) -> LatentAttentionSpec:
        num_heads, hidden = self.numbers.num_heads, self.numbers.hidden_size
        nope, rope = (at / "nope_dim").size(attention.nope_dim), (at / "rope_dim").size(attention.rope_dim)
        value = (at / "v_head_dim").size(attention.v_head_dim)
        if nope + rope != self.numbers.head_dim:
            raise at.error(f"nope_dim + rope_dim is {nope} + {rope}, but config.head_dim is {self.numbers.head_dim}")
        bias = (at / "bias").flag(attention.bias)
        q_down, q_norm, q = self.latent_query(attention, at, bias)
        latent, kv_at = attention.kv_latent, at / "kv_latent"
        rank = (kv_at / "rank").size(latent.rank)
        rows = {"k": num_heads * nope, "v": num_heads * value}
        kv_norm = self.norm(latent.norm, kv_at / "norm", rank)
        if kv_norm is None:
            raise (kv_at / "norm").error("the latent vector needs a norm")
        rotary = self.rotary(attention.rotary, at / "rotary", rope)
        if rotary is None:
            raise (at / "rotary").error("a latent attention needs a rotary embedding")
        kv_down = self.tensors.linear(kv_at / "down", latent.down, bias, hidden, rank + rope)
        split = self.split(latent.split, kv_at / "split")
        up = self.tensors.fused(
            kv_at, latent.fused, False, rank, rows, layout=latent.layout, split=split, sizes=self.axes
        )
        return LatentAttentionSpec(
            num_heads=num_heads,
            nope_dim=nope,
            rope_dim=rope,
            v_head_dim=value,
            kv_rank=rank,
            scale=(nope + rope) ** -0.5 if attention.scale is None else (at / "scale").factor(attention.scale),
            q_down=q_down,
            q_norm=q_norm,
            q=q,
            kv_down=kv_down,
            kv_norm=kv_norm,
            k_up=up["k"],
            v_up=up["v"],
            output=self.output(attention.output, at / "output", num_heads * value),
            rotary=rotary,
            node=at.ref(),
        )

    def latent_query(
        self, attention: schema.LatentAttention, at: Place, bias: bool
    ) -> tuple[LinearSpec | None, NormSpec | None, LinearSpec]:
        hidden, rows = self.numbers.hidden_size, self.numbers.num_heads * self.numbers.head_dim
        present = [
            key
            for key, query in (("q", attention.q), ("q_latent", attention.q_latent))
            if query is not None and (at / key / "when").flag(query.when)
        ]
        if len(present) != 1:
            raise at.error(f"exactly one of `q` and `q_latent` must be present, but there are {len(present)}")
        if present == ["q"]:
            assert attention.q is not None
            return None, None, self.tensors.linear(at / "q", attention.q.weight, False, hidden, rows)
        query, at = attention.q_latent, at / "q_latent"
        assert query is not None
        rank = (at / "rank").size(query.rank)
        down = self.tensors.linear(at / "down", query.down, bias, hidden, rank)
        norm = self.norm(query.norm, at / "norm", rank)
        return down, norm, self.tensors.linear(at / "up", query.up, False, rank, rows)

    # ----------------------------------------------------------------------------------------------- feed-forward

    def mlp(self, mlp: schema.FeedForward, at: Place, size: int | None = None) -> MlpSpec:
        """Resolves a feed-forward; ``size`` is given if it is already known."""
        hidden = self.numbers.hidden_size
        size = (at / "size").size(mlp.size) if size is None else size
        bias = (at / "bias").flag(mlp.bias)
        activation = (at / "activation").text(mlp.activation)
        gate = None
        layout = mlp.layout
        if mlp.fused is not None:
            assert layout is not None  # the schema requires both
            assert mlp.split is not None
            split, rows = self.split(mlp.split, at / "split"), {"gate": size, "up": size}
            sizes = {**self.axes, "out": size}
            both = self.tensors.fused(at, mlp.fused, bias, hidden, rows, layout=layout, split=split, sizes=sizes)
            gate, up, layout = both["gate"], both["up"], None
        else:
            assert mlp.up is not None
            if mlp.gate is not None:
                gate = self.linear(at / "gate", mlp.gate, bias, hidden, size, layout)
            up = self.linear(at / "up", mlp.up, bias, hidden, size, layout)
        down = self.linear(at / "down", mlp.down, bias, size, hidden, layout)
        return MlpSpec(mlp.kind, activation, gate, up, down, at.ref(), (at / "activation").ref())

    def moe(self, moe: schema.Moe, at: Place) -> MoeSpec:
        experts_at = at / "experts"
        count = (experts_at / "count").size(moe.experts.count, most=MAX_EXPERTS)
        if count * self.numbers.num_layers > MAX_EXPERTS_IN_ALL:  # checked before any of them is made
            raise (experts_at / "count").error(
                f"{count:,} experts in each of {self.numbers.num_layers:,} layers are more than {MAX_EXPERTS_IN_ALL:,}"
            )
        size = (experts_at / "size").size(moe.experts.size)
        experts = tuple(
            self.mlp(moe.experts, experts_at.within(self.expert_prefix(moe.experts, experts_at, index)), size)
            for index in range(min(count, self.most_experts))
        )
        shared = gate = None
        if moe.shared is not None and (at / "shared" / "when").flag(moe.shared.when):
            shared = self.mlp(moe.shared, at / "shared")
            if moe.shared_gate is not None:
                gate = self.tensors.linear(at / "shared_gate", moe.shared_gate, False, self.numbers.hidden_size, 1)
        return MoeSpec(self.router(moe.router, at / "router", count), experts, shared, gate, at.ref())

    @staticmethod
    def expert_prefix(experts: schema.Experts, at: Place, index: int) -> str:
        return experts.at.replace("{expert}", str(index)).replace("{layer}", str(at.scope.names["layer"]))

    def router(self, router: schema.Router, at: Place, num_experts: int) -> RouterSpec:
        top_k = (at / "top_k").size(router.top_k, most=num_experts)
        num_groups = (at / "num_groups").size(router.num_groups, most=num_experts)
        if num_experts % num_groups:
            raise (at / "num_groups").error(f"{num_experts} experts cannot be divided into {num_groups} equal groups")
        top_groups = num_groups
        if router.top_groups is not None:
            top_groups = (at / "top_groups").size(router.top_groups, most=num_groups)
        if top_k > top_groups * (num_experts // num_groups):
            raise (at / "top_groups").error(
                f"{top_groups} groups of {num_experts // num_groups} experts are fewer than top_k, which is {top_k}"
            )
        correction: TensorSpec | None = None
        if router.correction is not None:
            correction = self.tensors.tensor(at / "correction", router.correction, (num_experts,))
        return RouterSpec(
            weight=self.tensors.linear(at / "weight", router.weight, False, self.numbers.hidden_size, num_experts),
            top_k=top_k,
            scoring=router.scoring,
            normalize=(at / "normalize").flag(router.normalize),
            scale=(at / "scale").factor(router.scale),
            correction=correction,
            num_groups=num_groups,
            top_groups=top_groups,
            node=at.ref(),
        )

    def linear(
        self,
        at: Place,
        module: str,
        bias: bool,
        in_features: int,
        out_features: int,
        layout: Axes | None,
    ) -> LinearSpec:
        return self.tensors.linear(at, module, bias, in_features, out_features, layout=layout, sizes=self.axes)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns a slope per head, from steep to flat, computed in fp32 (Press et al., 2022).

    If the number of heads ``n`` is a power of two, the slopes are the powers 1, 2, … n of 2^(-8/n). Otherwise they are
    the slopes for the next lower power of two, followed by every second slope for the next higher one.
    """
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = _powers(2.0 ** (-8.0 / below), range(1, below + 1))
    return slopes + _powers(2.0 ** (-4.0 / below), range(1, 2 * (num_heads - below), 2))


def _powers(base: float, exponents: range) -> tuple[float, ...]:
    return tuple(_fp32(_fp32(base) ** exponent) for exponent in exponents)


def _fp32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)
