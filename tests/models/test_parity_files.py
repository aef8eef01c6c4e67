"""Files that transformers reads but does not write get its answers: keys left out, null, in two places, or not read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers
from transformers import PreTrainedModel

from tests.matrix import Record
from tests.models.test_parity_more import drawn_options
from tests.reference import check_family, save

SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 96, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
}
LLAMA = SIZES | {"num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5}
# By recipe: the architecture, and what a file of a tiny model states.
FILES: dict[str, tuple[str, dict[str, Any]]] = {"llama": ("LlamaForCausalLM", LLAMA)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"the activation {name}": ("llama", {"hidden_act": name}) for name in ("gelu_python", "gelu_python_tanh")},
    "the activation gelu_accurate": ("llama", {"hidden_act": "gelu_accurate"}),
    "keys of every class": (
        "llama",
        {"is_causal": True, "tie_last_hidden_states": None, "experts_implementation": "eager"},
    ),
}


def file_of(name: str, change: dict[str, Any]) -> dict[str, Any]:
    """The content of the ``config.json`` of a tiny model of the recipe ``name``."""
    architecture, stated = FILES[name]
    return {"architectures": [architecture], **stated, **change}


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_answers_of_transformers(case: str, record: Record) -> None:
    name, change = CASES[case]
    written = file_of(name, change)
    model_class = getattr(transformers, written["architectures"][0])

    def write(model: PreTrainedModel, directory: Path) -> None:
        (save(model, directory) / "config.json").write_text(json.dumps(written))

    config = model_class.config_class.from_dict(copy.deepcopy(written))
    record(name, "parity", check_family(config, model_class, drawn_options(Random(case)), 1, write=write, num_steps=8))
