"""The ops of a model by Triton kernels, and by the library that torch calls where it is as fast: weights stored as
they come, or quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastgen.compile.backends.modules import composed, fused
from fastgen.compile.backends.modules.stored import StoredGroups, StoredHeadMaps, StoredLinear, StoredTable
from fastgen.compile.backends.paged_view import PagedView
from fastgen.compile.capture.recording import library_call
from fastgen.compile.host.ranks import Ranks
from fastgen.compile.ops.activation.triton import ActivationKernel
from fastgen.compile.ops.embedding.triton import EmbeddingKernel, RowGatherKernel
from fastgen.compile.ops.experts.triton import CombineKernel, GroupedLinearKernel, RouteKernel, SortKernel
from fastgen.compile.ops.linear.triton import LinearKernel
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.compile.weights.quantized import QuantizedWeight
from fastgen.compile.weights.rows import Rows


class Positions(nn.Module):
    """Adds ``table[position + offset]`` in place: rows are gathered, then added by the library."""

    def __init__(self, table: StoredTable, offset: int, gather: RowGatherKernel):
        super().__init__()
        self.table, self.offset = table, offset
        self._gather = gather

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        assert isinstance(self.table.weight, Tensor)
        rows = torch.empty_like(x)
        self._gather(positions, self.table.weight[self.offset :], rows)
        library_call(torch.add, x, rows, out=x)
        return x


class Embedding(nn.Module):
    """Looks up tokens, scales them, and adds ``positions`` if there are some, in one kernel."""

    def __init__(self, tokens: StoredTable, kernel: EmbeddingKernel, positions: StoredTable | None):
        super().__init__()
        self.tokens, self.positions = tokens, positions
        self._kernel = kernel

    def forward(self, input_ids: Tensor, token_source: Tensor, sampled_ids: Tensor, positions: Tensor) -> Tensor:
        out = torch.empty(len(input_ids), self.tokens.size, dtype=self.tokens.dtype, device=input_ids.device)
        added = None if self.positions is None else self.positions.weight
        assert not isinstance(added, QuantizedWeight)
        self._kernel(input_ids, token_source, sampled_ids, self.tokens.weight, out, positions, added)
        return out


class Linear(StoredLinear):
    """``x Wᵀ + b`` of stacked parts, in the dtype of ``x`` unless there is an ``out_dtype``."""

    def __init__(
        self,
        kernel: LinearKernel,
        in_features: int,
        out_features: Sequence[int],
        biased: Sequence[bool],
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightOnlyFormat | None = None,
        ranks: Ranks | None = None,
        out_dtype: torch.dtype | None = None,
    ):
        super().__init__(
            in_features, out_features, biased, dtype=dtype, device=device, weight_format=weight_format, ranks=ranks
        )
        self._kernel, self._out_dtype = kernel, out_dtype

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.total, dtype=self._out_dtype or x.dtype)
        self._kernel(x, self.weight, self.bias, out)
        return out

    def finishes(self, x: Tensor) -> bool:
        """Returns whether kernels compute the layer of ``x`` and the op that follows at once."""
        return self._kernel.finishes(len(x))

    def finish(self, x: Tensor, out: Tensor, **others: Tensor) -> None:
        """Computes the layer and the op that follows it into ``out``; ``others`` are what the op takes beside."""
        self._kernel.finish(x, self.weight, self.bias, out, **others)


class ActivatedLinear(composed.ActivatedLinear):
    """An activation of a linear layer's outputs, which kernels for few rows compute at once."""

    linear: Linear

    def __init__(self, linear: Linear, activation: Activation):
        super().__init__(linear, activation)
        self._num_features = activation.num_features

    def forward(self, x: Tensor) -> Tensor:
        if not self.linear.finishes(x):
            return super().forward(x)
        out = x.new_empty(len(x), self._num_features)
        self.linear.finish(x, out)
        return out


class LinearAddNorm(composed.LinearAddNorm):
    """Adds a linear layer's output to a residual stream in place and norms the sum, all by the layer's last kernel
    where that has whole rows."""

    def __init__(self, linear: Linear, output_norm: fused.Norm | None, add_norm: fused.AddNorm):
        super().__init__(linear, output_norm, add_norm)
        self._finishes, self._finish = linear.finishes, linear.finish
        self._norms = {"first_norm": output_norm, "norm": add_norm.norm}

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if not self._finishes(y):
            return super().forward(x, y)
        out = torch.empty_like(x)
        weights = [fused.named_weights(*each) for each in self._norms.items()]
        self._finish(y, out, residual=x, **weights[0], **weights[1])
        return x, out


class ProjectedAttention(composed.ProjectedAttention):
    """The projection and attention. Kernels of the projection for few rows rotate, and write keys and values too."""

    qkv: Linear
    attention: fused.Attention

    def forward(self, x: Tensor, cos_sin: Tensor | None, positions: Tensor, cache: PagedView) -> Tensor:
        if not self.qkv.finishes(x):
            return super().forward(x, cos_sin, positions, cache)
        qkv = x.new_empty(len(x), self.qkv.total)
        others = {"positions": positions, "k_cache": cache.k, "v_cache": cache.v, "slots": cache.slots}
        others |= {} if cos_sin is None else {"cos_sin": cos_sin}
        self.qkv.finish(x, qkv, **others)
        return self.attention.attend(qkv, cache)


class Add:
    """Adds ``scale * y`` to ``x`` in place, by the library."""

    def __init__(self, scale: float | None):
        self._scale = 1 if scale is None else scale

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds ``scale * y`` to ``x``, both ``[T, H]``, and returns ``x``."""
        library_call(torch.add, x, y, alpha=self._scale, out=x)
        return x


class Activation:
    """``act(x)`` or ``act(gate) * up``, to ``num_features`` outputs."""

    def __init__(self, kernel: ActivationKernel, num_features: int):
        self._kernel, self.num_features = kernel, num_features

    def __call__(self, x: Tensor) -> Tensor:
        """Takes ``x [T, F]``, or ``[T, 2F]`` with the gate in the first half. Returns ``[T, F]``."""
        out = x.new_empty(len(x), self.num_features)
        self._kernel(x, out)
        return out


class HeadMaps(StoredHeadMaps):
    """A map of its own for each head, by the library."""

    def into(self, x: Tensor, out: Tensor) -> None:
        """Maps ``x [T, N, in]`` into ``out [T, N, out]``; each row of ``out`` may lie apart."""
        library_call(torch.bmm, x.transpose(0, 1), self.maps().transpose(1, 2), out=out.transpose(0, 1))


class Router(nn.Module):
    """Logits in fp32 by a linear layer, and the ``top_k`` experts chosen by them."""

    def __init__(self, linear: Linear, kernel: RouteKernel, top_k: int, correction: nn.Parameter | None):
        super().__init__()
        self.linear, self.top_k, self.correction = linear, top_k, correction
        self._kernel = kernel

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = self.linear(x)
        weights = logits.new_empty(len(logits), self.top_k)
        experts = torch.empty_like(weights, dtype=torch.int32)
        self._kernel(logits, self.correction, experts, weights)
        return experts, weights


@dataclass(frozen=True)
class ExpertCut:
    """Experts cut into tiles of one height: what sorts the choices, and the products."""

    sort: SortKernel
    inward: GroupedLinearKernel
    down: GroupedLinearKernel


class Experts(nn.Module):
    """The first product gathers rows by expert, the second scatters them back to their choices.

    ``cuts`` are by the rows that an expert gets on average, up to which each holds.
    """

    def __init__(
        self,
        inward: StoredGroups,
        activation: Activation,
        down: StoredGroups,
        cuts: dict[int, ExpertCut],
        combine: CombineKernel,
    ):
        super().__init__()
        self.inward, self.activation, self.down = inward, activation, down
        self._cuts, self._combine = cuts, combine

    def inward_part(self, expert: int, index: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of part ``index`` of an expert's first layer."""
        return self.inward.part(expert, index)

    def down_part(self, expert: int) -> tuple[Tensor | Rows, Tensor | None]:
        """Returns the place of an expert's second layer."""
        return self.down.part(expert, 0)

    def forward(
        self, x: Tensor, experts: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        outputs = self._outputs(x, experts)
        out = outputs.new_empty(len(weights), outputs.shape[1])
        self._combine(outputs, weights, out)
        if shared is None:
            return out
        if gate is not None:
            library_call(torch.sigmoid, gate, out=gate)
            library_call(torch.mul, shared, gate, out=shared)
        library_call(torch.add, out, shared, out=out)
        return out

    def _outputs(self, x: Tensor, experts: Tensor) -> Tensor:
        """Returns the output of each choice, ``[T * k, H]``; choices are numbered ``token * k + place``."""
        inward, down, num_choices = self.inward, self.down, experts.numel()
        cut = self._cuts[min(rows for rows in self._cuts if rows * inward.num_experts >= num_choices)]
        tiles = cut.sort(experts)
        inner = x.new_empty(num_choices, inward.total)
        cut.inward(x, inward.weight, inward.bias, tiles, num_choices, inner)
        inner = self.activation(inner)  # the outputs take the place of what it was made from
        outputs = x.new_empty(num_choices, down.total)
        cut.down(inner, down.weight, down.bias, tiles, num_choices, outputs)
        return outputs


class Head(nn.Module):
    """``softcap(scale * (hidden Wᵀ + bias))``; all behind the product by the library, a small part of the work."""

    def __init__(
        self,
        table: StoredTable,
        kernel: LinearKernel,
        *,
        bias: nn.Parameter | None,
        scale: float | None,
        softcap: float | None,
    ):
        super().__init__()
        self.table, self.bias, self.scale, self.softcap = table, bias, scale, softcap
        self._kernel = kernel

    @property
    def bias_slot(self) -> Tensor | None:
        """Returns the place of the checkpoint's bias."""
        return None if self.bias is None else self.bias.data

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = hidden.new_empty(len(hidden), self.table.num_rows, dtype=torch.float32)
        self._kernel(hidden, self.table.weight, None, out)
        if self.bias is not None:
            library_call(torch.add, out, self.bias, out=out)
        if self.scale is not None:
            library_call(torch.mul, out, self.scale, out=out)
        if self.softcap is not None:
            library_call(torch.div, out, self.softcap, out=out)
            library_call(torch.tanh, out, out=out)
            library_call(torch.mul, out, self.softcap, out=out)
        return out
