"""The ``triton`` target against transformers: the engine whole, its steps captured, every kernel interpreted, or
compiled on a GPU with ``--device cuda``.

Interpreted kernels are slow, so of whole models the fast tests run one family, Gemma 2, which has most features. The
long tests run every family, with one seed each. Sizes are those of the ``cpp`` target's tests, so windows are of a few
tokens; ``tests/compile/test_attention_windows.py`` has windows larger than a tile. In bf16 the interpreter's cast and
dot differ from hardware, so tests in bf16 replace both.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from transformers import OPTConfig, OPTForCausalLM
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.kernel_device import DEVICE
from tests.models.test_parity_cpp import SHARED, config_of
from tests.models.test_parity_more import DRAWS, Drawn
from tests.reference import check_family, rounding_errors

OPTIONS: Drawn = {
    "target": "triton",
    "device": DEVICE,
    "token_budget": 9,
    "block_size": 16,
    "max_num_seqs": 3,
    "max_model_len": 96,
}


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_family(name: str) -> None:
    config, model_class, attention = config_of(name, Random(f"{name} triton"), SHARED)
    check_family(config, model_class, OPTIONS, 0, attention=attention)


@pytest.mark.kernels
def test_a_family_with_most_features() -> None:
    """Windows, soft caps, norms around branches. The steps are fewer than in the long tests, and chunks larger."""
    config, model_class, attention = config_of("gemma2", Random("gemma2 triton"), SHARED)
    check_family(config, model_class, OPTIONS | {"token_budget": 16}, 0, attention=attention, num_steps=4)


@pytest.mark.kernels
@pytest.mark.slow
def test_positions_behind_a_projection() -> None:
    """OPT's 350m: norms after, a projection on either side, positions added between."""
    config = OPTConfig(
        vocab_size=70,
        hidden_size=32,
        word_embed_proj_dim=12,
        do_layer_norm_before=False,
        ffn_dim=41,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=96,
        pad_token_id=1,
    )
    check_family(config, OPTForCausalLM, OPTIONS, 0)


@pytest.fixture
def bfloat16_of_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as its bits: it cuts them off where hardware rounds, and multiplies the bits."""
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounding_cast(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, widened(source) if dtype.scalar == tl.float32 else source, dtype)
        rounded = torch.tensor(source.data).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(rounded, tl.bfloat16)

    def wide_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", wide_dot)


@pytest.mark.slow
@pytest.mark.usefixtures("bfloat16_of_hardware")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_weights_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """Both sides differ from the exact answer of the same weights in fp32; ours by no more than twice as much."""
    config, model_class, attention = config_of(name, Random(f"{name} in 16 bits"), SHARED)
    options = OPTIONS | {"token_budget": 16}
    error, their_error = rounding_errors(config, model_class, attention=attention, dtype=dtype, **options)
    print(f"{name} {dtype}: {error:.3e}, theirs {their_error:.3e}")
    assert 0 < error <= 2 * their_error, (error, their_error)
