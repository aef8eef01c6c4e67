"""Which generated kernels a model needs: its layers are made without memory, and asked."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastgen.compile.backends.target import Target
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.capture.tape import tape_spec
from fastgen.compile.host.thread_pool import thread_pool_spec
from fastgen.compile.ops.next_decodes.cpp import next_decodes_spec
from fastgen.compile.ops.sampling.cpp import sampling_spec
from fastgen.compile.ops.sampling.triton import SamplingSpecs, sampling_specs
from fastgen.compile.spec import KernelSpec
from fastgen.compile.weights.formats import QuantizedFormat
from fastgen.models.builder import build
from fastgen.models.spec import ModelSpec

# So many alternatives' log-probabilities are computed by sampling kernels of the ``triton`` target, for who asks.
MAX_LOGPROBS = 20
_MAX_NUM_SEQS = 256  # of an engine on a GPU, unless it is told otherwise


def kernel_specs(
    model: ModelSpec,
    loader: KernelLoader,
    dtype: torch.dtype,
    *,
    weight_format: QuantizedFormat | None = None,
    block_size: int | None = None,
    max_num_seqs: int | None = None,
) -> list[KernelSpec]:
    """Each kernel that ``model`` needs on the loader's target once, by name, with all recipe nodes that ask for it.

    ``dtype`` is that of the weights, ``weight_format`` what matrices are kept in, where that differs; ``block_size`` is
    in tokens, by default an engine's; ``max_num_seqs`` matters to GPUs alone. With the model's kernels come the
    sampler's, and on ``cpp`` the libraries that run them.
    """
    target = Target(loader, max_rows=1, max_num_seqs=max_num_seqs or _MAX_NUM_SEQS)
    build(
        model,
        dtype=dtype,
        device=torch.device("meta"),
        max_model_len=model.max_positions or 1,
        target=target,
        weight_format=weight_format,
        **({} if block_size is None else {"block_size": block_size}),
    )
    if target.name == "triton":
        sampler = sampler_specs(model.vocab_size)
        return sorted([*target.specs(), sampler.scan, sampler.draw, sampler.choose], key=lambda spec: spec.name)
    pool = replace(thread_pool_spec(), needed_by=("every kernel that runs on several threads",))
    steps = sampling_spec(target.arch, needed_by=("the sampler",)), next_decodes_spec(needed_by=("every engine",))
    return sorted([*target.specs(), *steps, pool, tape_spec()], key=lambda spec: spec.name)


def sampler_specs(vocab_size: int) -> SamplingSpecs:
    """The kernels by which the ``triton`` target samples."""
    return sampling_specs(vocab_size, num_top=min(MAX_LOGPROBS + 1, vocab_size), needed_by=("the sampler",))
