"""The requests that engines are given, and the records of their runs."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cpu import models, workloads
from benchmarks.cpu.engine_process import Run
from benchmarks.cpu.figures import decode_rate, figures, quantiles

SMALL = models.Shape(hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, dtype=torch.float32)


def test_workloads_are_the_same_everywhere() -> None:
    assert {name: workloads.fingerprint(workloads.make(name)) for name in (*workloads.TIMED, workloads.GATE)} == {
        "W1": "c7ff50c6ea187616",
        "W2": "5562081ed8fd98f6",
        "W3": "7cb515680c5ae8e8",
        "W4": "b45a8bee30036043",
        "G0": "61ef2e938ea1df16",
    }


def test_workloads_have_their_sizes() -> None:
    sizes = {name: [(len(each.prompt), each.num_new) for each in workloads.make(name)] for name in workloads.TIMED}
    assert sizes["W1"] == [(128, 128)]
    assert sizes["W2"] == [(2048, 1)]
    assert sizes["W4"] == [(32, 128)] * 16
    prompts, new = zip(*sizes["W3"], strict=True)
    assert len(prompts) == 32
    assert 420 < sum(prompts) / 32 < 620
    assert 20 < sum(new) / 32 < 32
    assert len(set(prompts)) > 20
    assert all(300 <= token < 31_900 for each in workloads.make("W3") for token in each.prompt)
    assert workloads.make("W3", seed=1) != workloads.make("W3")
    with pytest.raises(ValueError, match="W9"):
        workloads.make("W9")


def test_random_models_are_whole_checkpoints() -> None:
    found = models.weights(SMALL, seed=0)
    expected = LlamaForCausalLM(LlamaConfig(**models.config(SMALL))).state_dict()
    assert {name: each.shape for name, each in found.items()} == {name: each.shape for name, each in expected.items()}
    in_layers = sum(each.numel() for name, each in found.items() if each.ndim == 2 and ".layers." in name)
    assert (SMALL.layer_weights, SMALL.head_weights) == (in_layers, found["lm_head.weight"].numel())
    assert all(torch.equal(each, models.weights(SMALL, seed=0)[name]) for name, each in found.items())


def test_the_models_are_as_large_as_their_names_say() -> None:
    totals = {name: shape.layer_weights + 2 * shape.head_weights for name, shape in models.SHAPES.items()}
    assert round(totals["llama-110m"] / 1e6) == 125
    assert round(totals["llama-1.1b"] / 1e9, 1) == 1.1


def test_figures_of_a_run() -> None:
    requests = [workloads.Request([1, 2, 3], 3), workloads.Request([4], 2)]
    run = Run(2.0, [[7, 8, 9], [5, 6]], [[0.5, 1.0, 2.0], [1.0, 1.5]], 1000)
    found = figures(requests, run)
    assert (found["prompt_tokens"], found["new_tokens"], found["seconds"]) == (4, 5, 2.0)
    assert found["first_token_s"]["p50"] == 0.75
    assert found["gap_s"]["max"] == 1.0
    # From 1.0, when both have their first token, to 2.0 there are two more.
    assert found["decode_rate"] == 2.0
    other = Run(2.0, [[7, 8, 9], [5, 7]], run.times, 1000)
    assert figures(requests, other)["answer"] != found["answer"]


def test_figures_without_times() -> None:
    assert quantiles([]) == {}
    assert decode_rate([[], []]) is None
    assert decode_rate([[0.5]]) is None
