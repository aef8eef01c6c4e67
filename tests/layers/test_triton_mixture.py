"""A mixture of experts by interpreted Triton kernels against the reference target: what no shipped recipe has, or an
engine's own tests see only together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen.compile.backends.backend import Backend
from fastgen.compile.backends.choose import backend_of
from fastgen.compile.backends.reference import REFERENCE
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.compile.capture.recording import library_call
from fastgen.layers.moe import Moe
from fastgen.models.builder import build
from fastgen.models.recipe.recipe import load_recipe
from fastgen.models.resolve.resolve import resolve

CPU = torch.device("cpu")
HIDDEN, MAX_TOKENS = 24, 9
CONFIG: dict[str, Any] = {
    **{"vocab_size": 40, "hidden_size": HIDDEN, "intermediate_size": 20, "num_hidden_layers": 1, "hidden_act": "silu"},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6},
    **{"num_local_experts": 5, "num_experts_per_tok": 2},
}
RECIPE = """name: mixed
extends: mixtral
model:
  layers:
    residual:
      transform:
        moe:
          experts: {bias: true}
          shared: {kind: plain, size: 12, activation: "'gelu'", up: up, down: down, bias: true}
          shared_gate: shared_gate
"""


def mixture(recipe: Path, backend: Backend, dtype: torch.dtype) -> Moe:
    """Returns a mixture that has the same weights whatever the backend."""
    spec = resolve(load_recipe(recipe), CONFIG)
    model, slots = build(spec, dtype=dtype, device=CPU, max_model_len=64, backend=backend)
    generator = torch.Generator().manual_seed(1)
    for slot in slots:
        slot.target.copy_(torch.randn(slot.spec.shape, generator=generator) / 4)
    backend.build()
    (moe,) = (module for module in model.modules() if isinstance(module, Moe))
    return moe


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3)], ids=["fp32", "fp16"])
def test_a_shared_expert_with_a_gate_and_biases(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    (tmp_path / "mixed.yaml").write_text(RECIPE)
    loader = KernelLoader(TritonBuilder("interpret"), cache=KernelCache(tmp_path / "kernels"))
    moe = mixture(tmp_path / "mixed.yaml", backend_of(loader, max_rows=MAX_TOKENS, max_num_seqs=4, num_sms=2), dtype)
    reference = mixture(tmp_path / "mixed.yaml", REFERENCE, dtype)
    assert moe.shared_gate is not None
    x, out = torch.empty(MAX_TOKENS, HIDDEN, dtype=dtype), torch.empty(MAX_TOKENS, HIDDEN, dtype=dtype)

    def step() -> None:
        library_call(torch.add, moe(x), 0, out=out)

    with torch.inference_mode():
        for num_tokens in (1, 5):
            few = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(num_tokens)).to(dtype)
            torch.testing.assert_close(moe(few), reference(few), rtol=tolerance, atol=tolerance)
        x.zero_()
        graph = GraphPool(CPU, loader).capture("the mixture", step)
        for seed in range(2):  # other tokens choose other experts
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            torch.testing.assert_close(out, reference(x), rtol=tolerance, atol=tolerance)
