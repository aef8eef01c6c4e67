"""The ops of a model by torch alone: plain, and what every kernel is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastgen.compile.backends.modules.stored import (
    NormParameters,
    StoredGroups,
    StoredHeadMaps,
    StoredLinear,
    StoredTable,
    empty_parameter,
)
from fastgen.compile.capture.recording import library_call
from fastgen.compile.ops.activation.reference import activate, activate_and_multiply
from fastgen.compile.ops.add.reference import scaled_add
from fastgen.compile.ops.embedding.reference import embed, embed_some, resolve_token_ids
from fastgen.compile.ops.experts.reference import Scoring, combine, route, sort_by_expert
from fastgen.compile.ops.linear.reference import grouped_linear, linear, logits, per_head_linear
from fastgen.compile.ops.norm.reference import layer_norm, rms_norm
from fastgen.compile.ops.softcap.reference import soft_cap
from fastgen.compile.weights.rows import Rows


class Table(StoredTable):
    """A table whose rows are looked up by ``ids [T]``: ``[T, size]``."""

    def forward(self, ids: Tensor, first_id: int | None = None) -> Tensor:
        found = embed(ids, self.weight) if first_id is None else embed_some(ids, self.weight, first_id)
        return found.to(self.dtype)


class Positions(nn.Module):
    """Adds ``table[position + offset]``."""

    def __init__(self, table: Table, offset: int):
        super().__init__()
        self.table, self.offset = table, offset

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        added: Tensor = self.table(positions + self.offset)
        return x + added


class Embedding(nn.Module):
    """Looks up tokens, scales them, and adds ``positions`` if there are some. With a ``first_id`` the table has the
    rows of that id and those behind it."""

    def __init__(self, tokens: Table, scale: float | None, positions: Positions | None, first_id: int | None = None):
        super().__init__()
        self.tokens, self.scale, self.positions, self.first_id = tokens, scale, positions, first_id

    def forward(self, input_ids: Tensor, token_source: Tensor, sampled_ids: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.tokens(resolve_token_ids(input_ids, token_source, sampled_ids), self.first_id)
        if self.scale is not None:
            x = x * self.scale
        return x if self.positions is None else self.positions(x, positions)


class Linear(StoredLinear):
    """``x Wᵀ + b`` of ``x [T, in]``."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(NormParameters):
    """An RMS or layer norm of ``x [T, …, H]``; see :mod:`fastgen.compile.ops.norm.reference`."""

    def __init__(
        self,
        kind: str,
        shape: Sequence[int],
        eps: float,
        *,
        weight: bool,
        bias: bool,
        offset: float = 0.0,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(shape, weight=weight, bias=bias, dtype=dtype, device=device)
        self.kind, self.eps, self.offset = kind, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rms":
            return rms_norm(x, self.weight, self.eps, self.offset)
        return layer_norm(x, self.weight, self.bias, self.eps, self.offset)


class AddNorm(nn.Module):
    """Adds ``scale * y`` to ``x``, then norms the sum."""

    def __init__(self, norm: Norm, scale: float | None):
        super().__init__()
        self.norm, self.scale = norm, scale

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = scaled_add(x, y, self.scale)
        return x, self.norm(x)


class Activation(nn.Module):
    """``act(x)``, or if it is ``gated`` ``act(gate) * up``."""

    def __init__(self, kind: str, *, gated: bool):
        super().__init__()
        self.kind, self.gated = kind, gated

    def forward(self, x: Tensor) -> Tensor:
        return activate_and_multiply(x, self.kind) if self.gated else activate(x, self.kind)


class HeadMaps(StoredHeadMaps):
    """A map of its own for each head."""

    def forward(self, x: Tensor) -> Tensor:
        return per_head_linear(x, self.maps())


class Router(nn.Module):
    """Logits in fp32, and the experts chosen by them; see :func:`fastgen.compile.ops.experts.reference.route`."""

    def __init__(
        self,
        linear: Linear,
        *,
        top_k: int,
        scoring: Scoring,
        normalize: bool,
        corrected: bool,
        scale: float | None,
        num_groups: int,
        top_groups: int,
        device: torch.device,
    ):
        super().__init__()
        self.linear, self.top_k, self.scoring, self.normalize, self.scale = linear, top_k, scoring, normalize, scale
        self.num_groups, self.top_groups = num_groups, top_groups
        self.correction = router_correction(linear.total, device) if corrected else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return route(
            logits(x, self.linear.weight, self.linear.bias),
            self.correction,
            top_k=self.top_k,
            scoring=self.scoring,
            normalize=self.normalize,
            scale=self.scale,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
        )


def router_correction(num_experts: int, device: torch.device) -> nn.Parameter:
    """Returns a router's correction, in fp32 whatever the model's dtype: rounding must not choose between experts."""
    return empty_parameter(num_experts, dtype=torch.float32, device=device)


class Experts(nn.Module):
    """Rows sorted by expert, each expert's layers on its own rows, and the weighted sum."""

    def __init__(self, inward: StoredGroups, activation: Activation, down: StoredGroups):
        super().__init__()
        self.inward, self.activation, self.down = inward, activation, down

    def inward_part(self, expert: int, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of part ``index`` of an expert's first layer."""
        return self.inward.part(expert, index)

    def down_part(self, expert: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of an expert's second layer."""
        return self.down.part(expert, 0)

    def forward(
        self, x: Tensor, experts: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        order, counts = sort_by_expert(experts, self.inward.num_experts)
        rows, inward, down = order // experts.shape[1], self.inward, self.down
        inner = self.activation(grouped_linear(x[rows], inward.weight, inward.bias, counts))
        out = combine(grouped_linear(inner, down.weight, down.bias, counts), order, weights)
        if shared is None:
            return out
        return out + (shared if gate is None else gate.sigmoid() * shared)


class Head(nn.Module):
    """``softcap(scale * (hidden Wᵀ + bias))`` in fp32."""

    def __init__(
        self,
        table: Table,
        *,
        biased: bool,
        scale: float | None,
        softcap: float | None,
        device: torch.device,
    ):
        super().__init__()
        self.table, self.scale, self.softcap = table, scale, softcap
        self.bias = empty_parameter(table.num_rows, dtype=torch.float32, device=device) if biased else None

    @property
    def bias_slot(self) -> Tensor | None:
        """Returns the place of the checkpoint's bias."""
        return None if self.bias is None else self.bias.data

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        made = logits(hidden, self.table.weight, self.bias)
        if self.scale is not None:
            library_call(torch.mul, made, self.scale, out=made)
        return made if self.softcap is None else soft_cap(made, self.softcap)
