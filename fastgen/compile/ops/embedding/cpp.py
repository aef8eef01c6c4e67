"""The C++ kernel that looks up rows of embedding tables, plain ones or ones packed for linear layers."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec, Value
from fastgen.compile.weights.packed import LANES, PANELS, PackedWeight, WeightFormat, layout_of


def embedding_spec(
    arch: str,
    table_format: str,
    *,
    packed: bool,
    offset: int | None = None,
    scale: float | None = None,
    rows: tuple[int, int] | None = None,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the kernel for :class:`EmbeddingKernel`. ``table_format`` is a dtype's short name, or with ``packed`` a
    weight format.

    Without an ``offset`` it looks up ``scale * table[id]`` for the ids of
    :func:`~fastgen.compile.ops.embedding.reference.resolve_token_ids`; with one it adds ``table[position + offset]``.
    A table that has only some ``rows``, from a first id so many, gives zeros for other ids.
    """
    if packed:
        table_format = layout_of(cast(WeightFormat, table_format), arch)
    resolve, row_scaled = offset is None, packed and table_format in ("int8", "int8_weight_only")
    parameters: dict[str, Value] = {"format": table_format, "packed": packed, "resolve": resolve}
    parameters |= {"offset": offset, "scale": scale, "added": not resolve, "row_scaled": row_scaled}
    parameters |= {"panel": PANELS[arch] if packed else None, "lanes": LANES[arch] if packed else None}
    if rows is not None:
        parameters |= {"first_id": rows[0], "num_rows": rows[1]}
    arguments = [
        Argument("ids", "i32", "in"),
        *([Argument(name, "i32", "in") for name in ("token_source", "sampled_ids")] if resolve else []),
        Argument("table", "u8" if packed else table_format, "in"),
        *([Argument("row_scales", "fp32", "in")] if row_scaled else []),
        *([Argument("panel_bytes", "i64", "scalar")] if packed else []),
        Argument("out", "fp32", "out"),
        *(Argument(name, "i64", "scalar") for name in ("num_tokens", "num_features")),
    ]
    return KernelSpec("embedding", "cpp", parameters, tuple(arguments), needed_by=needed_by)


class EmbeddingKernel:
    """Launches a kernel of :func:`embedding_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __call__(self, table: Tensor | PackedWeight, out: Tensor, *ids: Tensor) -> None:
        """Takes ``table [rows, H]`` and ``out [T, H]`` fp32. ``ids`` are the batch's ``input_ids, token_source [T]``
        and ``sampled_ids [S]``, or its ``positions [T]``, i32. Every tensor is contiguous.
        """
        if isinstance(table, PackedWeight):
            scales = (table.scale,) if self._kernel.spec.parameters["row_scaled"] else ()
            stored = (table.panels, *scales, table.panels.stride(0))
        else:
            stored = (table,)
        self._kernel((), *ids, *stored, out, *out.shape)
