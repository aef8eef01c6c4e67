"""Arguments of kernels in steps of every recipe, as a GPU would get them. The model, its inputs and all in between lie
on the meta device, which computes nothing and mixes with other devices as little as a GPU does.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.backends.choose import backend_of
from fastgen.compile.build.builder import BuiltKernel
from fastgen.compile.build.loader import KernelLoader, make_builder
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.compile.spec import KernelSpec, torch_dtype
from fastgen.compile.weights.formats import WeightOnlyFormat
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.models.builder import build, kv_groups, kv_shapes
from fastgen.models.spec import ModelSpec
from fastgen.runtime.sampling.slot_sampler import slot_sampler
from fastgen.runtime.step.forward import CapturedForward, Results
from fastgen.runtime.step.input_batch import InputBatch
from tests.models.test_kernel_specs import published

META, DTYPE = torch.device("meta"), torch.bfloat16
# Rows of one tile of few-row kernels, of several, and for the library; of few and of many rows to an expert.
SIZES, ROW_SIZES = (1, 70, 600), (1, 70)
# A model whose kernel takes the stride between the queries of tokens, and one whose values are part of the keys.
STRIDED = {"q", "v_cache"}


class Checked(BuiltKernel):
    """In the place of a kernel: looks at what it is given."""

    def __init__(self, spec: KernelSpec, launched: list[KernelSpec]):
        super().__init__(spec, Path())
        self._launched = launched

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        self._launched.append(self.spec)
        assert min(grid) >= 0
        for declared, given in zip(self.spec.arguments, arguments, strict=True):
            what = f"{self.spec.name}: {declared.name}"
            if not declared.is_pointer:
                assert type(given) is (int if declared.dtype == "i32" else float), what
                continue
            assert isinstance(given, Tensor), what
            assert given.device == META, what
            assert given.dtype == torch_dtype(declared.dtype), what
            assert given.is_contiguous() or declared.name in STRIDED, what


def launches(model_spec: ModelSpec, weight_format: WeightOnlyFormat | None = None) -> list[KernelSpec]:
    """Returns the launches of a captured step at each of the sizes, and of the sampling behind it."""
    loader = KernelLoader(make_builder("sm_90"))
    backend = backend_of(loader, max_rows=SIZES[-1], max_num_seqs=ROW_SIZES[-1], num_sms=132)
    groups, shapes, vocab_size = kv_groups(model_spec), kv_shapes(model_spec), model_spec.vocab_size
    model, _ = build(
        model_spec, dtype=DTYPE, device=META, max_model_len=700, backend=backend, weight_format=weight_format
    )
    inputs = InputBatch(
        token_budget=SIZES[-1],
        max_num_seqs=ROW_SIZES[-1],
        max_rows=ROW_SIZES[-1],
        num_groups=len(shapes),
        max_blocks=44,
        block_size=16,
        device=META,
    )
    slots = slot_sampler(backend, vocab_size, inputs)
    assert slots is not None
    launched: list[KernelSpec] = []
    for asked in backend.kernels._kernels.values():
        asked.kernel = Checked(asked.spec, launched)
    forward = CapturedForward(
        model,
        PagedKVCache(groups, shapes, num_blocks=50, block_size=16, dtype=DTYPE, device=META),
        GraphPool(META, loader),
        inputs.views,
        Results(model_spec.hidden_size, vocab_size, DTYPE, META),
        sizes=SIZES,
        row_sizes=ROW_SIZES,
        sample=slots.launch,
    )
    with torch.inference_mode():
        for size in SIZES:
            forward._forward_step(size)
        for num_rows in ROW_SIZES:
            forward._head_step(num_rows)
    return launched


@pytest.fixture(scope="module")
def models() -> dict[str, ModelSpec]:
    return published()


def test_a_step_of_every_recipe_stays_on_its_device(models: dict[str, ModelSpec]) -> None:
    for name, model_spec in models.items():
        print(name)
        launched = launches(model_spec)
        ops = {spec.op for spec in launched}
        assert ops >= {"embedding", "attention_plan", "attention", "sampling_choose"}
        kinds = Counter(spec.parameters["kind"] for spec in launched if spec.op == "attention")
        num_attentions = len(SIZES) * len(list(model_spec.attentions()))
        assert kinds == {"chunks": num_attentions, "decodes": num_attentions}
        others = {op for op in ops if "attention" in op} - {"attention", "attention_plan"}
        assert not others, "a layer's attention is two launches"


@pytest.mark.parametrize("weight_format", ["int8_weight_only", "int4_weight_only", "fp8_weight_only"])
def test_so_does_one_with_quantized_weights(weight_format: WeightOnlyFormat, models: dict[str, ModelSpec]) -> None:
    ops = {spec.op for spec in launches(models["llama"], weight_format)}
    assert ops >= {"few_row_linear", "dequantize"}
