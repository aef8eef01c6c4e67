"""The Triton kernels of :mod:`~fastgen.compile.ops.embedding.reference`, one for tokens and one for rows by number."""

from __future__ import annotations

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec, Value, power_of_2
from fastgen.compile.weights.quantized import CODES, SCALES, QuantizedWeight

_BLOCK = 1024  # features of a program, eight for each of its threads


def embedding_spec(
    size: int,
    dtype: str,
    *,
    table_dtype: str = "",
    scale: float = 1.0,
    position_offset: int | None = None,
    rows: tuple[int, int] | None = None,
    needed_by: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the kernel for :class:`EmbeddingKernel`: ``scale * table[id] + position_table[position + offset]``.

    Rows of ``size`` features; tables hold ``table_dtype``, which is ``dtype`` unless given, and each operation is
    rounded to ``dtype``. ``table_dtype`` may also be a format of :class:`QuantizedWeight`; positions are then in
    ``dtype``. Ids are those of :func:`~fastgen.compile.ops.embedding.reference.resolve_token_ids`.
    Without a ``position_offset`` no positions are added. A table that has only some ``rows``, from a first id so many,
    gives zeros for other ids.
    """
    parameters: dict[str, Value] = {"H": size, "dtype": dtype, "table_dtype": table_dtype or dtype, "resolve": True}
    parameters |= {"scale": None if scale == 1 else scale, "offset": position_offset}
    if rows is not None:
        parameters |= {"first_id": rows[0], "num_rows": rows[1]}
    is_quantized = table_dtype in CODES
    plain = dtype if is_quantized or not table_dtype else table_dtype
    arguments = [
        *(Argument(name, "i32", "in") for name in ("token_source", "sampled_ids")),
        Argument("table", CODES.get(table_dtype, plain), "in"),
        *([Argument("table_scale", SCALES[table_dtype], "in")] if is_quantized else []),
    ]
    if position_offset is not None:
        arguments += [Argument("positions", "i32", "in"), Argument("position_table", plain, "in")]
    return _spec("embedding", parameters, arguments, needed_by)


def row_gather_spec(size: int, dtype: str, *, needed_by: tuple[str, ...] = ()) -> KernelSpec:
    """Returns the kernel of :func:`~fastgen.compile.ops.embedding.reference.embed` for rows of ``size`` features, for
    :class:`RowGatherKernel`."""
    parameters: dict[str, Value] = {"H": size, "dtype": dtype, "table_dtype": dtype}
    parameters |= dict.fromkeys(("resolve", "scale", "offset"))
    return _spec("row_gather", parameters, [Argument("table", dtype, "in")], needed_by)


def _spec(op: str, parameters: dict[str, Value], arguments: list[Argument], needed_by: tuple[str, ...]) -> KernelSpec:
    size, dtype = parameters["H"], parameters["dtype"]
    assert isinstance(size, int)
    assert isinstance(dtype, str)
    block = min(_BLOCK, max(32, power_of_2(size)))
    return KernelSpec(
        op,
        "triton",
        parameters | {"block": block, "tiles": -(-size // block)},
        (Argument("ids", "i32", "in"), *arguments, Argument("out", dtype, "out")),
        {"num_warps": max(1, block // 256)},
        template="embedding",
        needed_by=needed_by,
    )


class EmbeddingKernel:
    """Launches a kernel of :func:`embedding_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel, self._tiles = kernel, kernel.spec.parameters["tiles"]

    def __call__(
        self,
        input_ids: Tensor,
        token_source: Tensor,
        sampled_ids: Tensor,
        table: Tensor | QuantizedWeight,
        out: Tensor,
        positions: Tensor | None = None,
        position_table: Tensor | None = None,
    ) -> None:
        """Takes ``input_ids, token_source, positions [T]`` and ``sampled_ids [S]``, all i32; ``table [V, H]``,
        ``position_table [max_positions, H]``, ``out [T, H]``; every tensor is contiguous. Positions are ignored where
        the kernel adds none.
        """
        assert isinstance(self._tiles, int)
        placed = () if self._kernel.spec.parameters["offset"] is None else (positions, position_table)
        grid = (len(out) * self._tiles,)
        stored = (table.codes, table.scale) if isinstance(table, QuantizedWeight) else (table,)
        self._kernel(grid, input_ids, token_source, sampled_ids, *stored, *placed, out)


class RowGatherKernel:
    """Launches a kernel of :func:`row_gather_spec`, such as for the tokens whose logits are needed."""

    def __init__(self, kernel: Kernel):
        self._kernel, self._tiles = kernel, kernel.spec.parameters["tiles"]

    def __call__(self, indices: Tensor, table: Tensor, out: Tensor) -> None:
        """Copies rows ``indices [R]`` i32 of ``table [T, H]`` to ``out [R, H]``; every tensor is contiguous."""
        assert isinstance(self._tiles, int)
        self._kernel((len(out) * self._tiles,), indices, table, out)
