"""The ``triton`` target against transformers: the engine whole, its steps captured, every kernel interpreted.

Interpreted kernels are slow, so a few families that between them have every feature stand for all; the long tests take
each. Sizes are those of the ``cpp`` target's tests.
"""

from __future__ import annotations

from random import Random

import pytest
from transformers import OPTConfig, OPTForCausalLM

from tests.models.test_parity_cpp import SHARED, config_of
from tests.models.test_parity_more import DRAWS, Drawn
from tests.reference import check_family

OPTIONS: Drawn = {"target": "triton", "token_budget": 9, "block_size": 16, "max_num_seqs": 3, "max_model_len": 96}
QUICK = ("gemma2", "falcon_rw", "cohere")
"""Windows, soft caps, norms around branches; ALiBi and biases; parallel parts, interleaved rotary, a scaled head."""
CASES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in DRAWS]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in DRAWS]
)
def test_family(name: str) -> None:
    config, model_class, attention = config_of(name, Random(f"{name} triton"), SHARED)
    check_family(config, model_class, OPTIONS, 0, attention=attention)


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
