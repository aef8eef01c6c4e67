"""lm_eval gives a model the same scores over HTTP as transformers give it from the same files.

lm_eval stands in an environment of its own (``make clients``); ``FASTGEN_CLIENTS`` names another.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fastgen.models.checkpoint.hub import locate
from tests.serving.server_process import served

CLIENTS = Path(os.environ.get("FASTGEN_CLIENTS", Path(__file__).parents[2] / ".clients"))
PYTHON = CLIENTS / "bin" / "python"
CHOICES, STORIES = "fastgen_choices", "fastgen_stories"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.is_file(), reason=f"lm_eval is not installed in {CLIENTS}: make clients")
def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    directory = locate("tiny-llama")
    with served("tiny-llama", "--dtype", "float32") as server:
        hf = {"pretrained": str(directory), "dtype": "float32"}
        # transformers' side begins every text as the tokenizer does; this one does as it is told.
        completions = {
            "model": "tiny-llama",
            "base_url": f"{server.address}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": str(directory),
            "add_bos_token": True,
            "max_length": 2048,
            "num_concurrent": 4,
        }
        chats = {"model": "tiny-llama", "base_url": f"{server.address}/v1/chat/completions", "num_concurrent": 4}
        runs = [
            {"model": "hf", "model_args": hf, "tasks": [CHOICES, STORIES], "chat": False},
            {"model": "local-completions", "model_args": completions, "tasks": [CHOICES, STORIES], "chat": False},
            {"model": "hf", "model_args": hf, "tasks": [STORIES], "chat": True},
            {"model": "local-chat-completions", "model_args": chats, "tasks": [STORIES], "chat": True},
        ]
        found = tmp_path / "results.json"
        environment = os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        subprocess.run(
            [PYTHON, Path(__file__).with_name("lm_eval_run.py"), json.dumps(runs), found], env=environment, check=True
        )
    plain, over_http, plain_chat, chat_over_http = json.loads(found.read_text())
    print(json.dumps([plain["metrics"], plain_chat["metrics"]]))
    assert over_http["metrics"] == plain["metrics"]
    assert chat_over_http["metrics"] == plain_chat["metrics"]
    assert over_http["answers"][STORIES] == plain["answers"][STORIES]
    assert chat_over_http["answers"][STORIES] == plain_chat["answers"][STORIES]
    assert 0 < plain["metrics"][STORIES]["exact_match,stripped"] < 1  # a score that answers could change
    scores, expected = (flat(run["answers"][CHOICES]) for run in (over_http, plain))
    assert len(scores) == 48
    for (score, is_greedy), (wanted, wanted_greedy) in zip(scores, expected, strict=True):
        assert math.isclose(score, wanted, rel_tol=1e-4, abs_tol=1e-4)
        assert is_greedy == wanted_greedy


def flat(answers: list[Any]) -> list[tuple[float, bool]]:
    """Returns the log-likelihood of each choice of each sample, and whether it is the most likely text."""
    return [(float(score), str(greedy) == "True") for sample in answers for ((score, greedy),) in sample]
