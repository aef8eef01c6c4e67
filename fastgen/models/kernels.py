"""The generated kernels that a model needs, found by making its layers without memory."""

from __future__ import annotations

import torch

from fastgen.compile.backends.choose import backend_of
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.spec import KernelSpec
from fastgen.compile.weights.formats import QuantizedFormat
from fastgen.models.builder import build
from fastgen.models.spec import ModelSpec

_MAX_NUM_SEQS = 256  # the default of an engine on a GPU


def kernel_specs(
    model: ModelSpec,
    loader: KernelLoader,
    dtype: torch.dtype,
    *,
    weight_format: QuantizedFormat | None = None,
    block_size: int | None = None,
    max_num_seqs: int | None = None,
) -> list[KernelSpec]:
    """Returns each kernel that ``model`` needs on the loader's target once, by name, with all recipe nodes that need
    it, and the kernels that an engine needs beside them.

    ``dtype`` is that of the weights, ``weight_format`` that of matrices if it is another one; ``block_size`` is in
    tokens, by default an engine's; ``max_num_seqs`` matters only on GPUs.
    """
    backend = backend_of(loader, max_rows=1, max_num_seqs=max_num_seqs or _MAX_NUM_SEQS)
    build(
        model,
        dtype=dtype,
        device=torch.device("meta"),
        max_model_len=model.max_positions or 1,
        backend=backend,
        weight_format=weight_format,
        **({} if block_size is None else {"block_size": block_size}),
    )
    return sorted([*backend.specs(), *backend.engine_specs(model.vocab_size)], key=lambda spec: spec.name)
