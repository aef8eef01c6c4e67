"""The loss of quality by weight formats, as it is computed and reported."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.quality import quantization


def test_nothing_moved_between_equals() -> None:
    same = torch.randn(5, 50).log_softmax(-1)
    assert quantization.moved(same, same) == {
        "kl": pytest.approx(0, abs=1e-6),
        "logit_error": pytest.approx(0, abs=1e-6),
        "same_first": 1.0,
        "positions": 5,
    }


def test_moved_by_hand() -> None:
    reference = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    found = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    measured = quantization.moved(reference, found)
    # Logits of the first position are ∓ln 3 / 2 and turn around, those of the second are equal.
    half = math.log(3) / 2
    values = torch.tensor([-half, half, 0, 0])
    assert measured["kl"] == pytest.approx(0.5 * math.log(3) / 2)
    assert measured["logit_error"] == pytest.approx(math.sqrt((2 * half) ** 2 / 2) / float(values.std()))
    assert measured["same_first"] == 0.5


@pytest.mark.slow
def test_a_model_and_the_page() -> None:
    with quantization.load("tiny-llama", "fp32") as llm:
        found = quantization.perplexity(llm, 1)
    assert 1.1 < found["perplexity"] < 2.5  # the last loss of its training was 0.48, e to that is 1.6
    assert 200 < found["tokens"] < 512
    page = quantization.render(
        {
            "about": {"date": "2026-01-02T", "machine": "a CPU", "fastgen": "1", "torch": "2"},
            "perplexity": {
                "tiny-llama": {
                    name: {"perplexity": 2.0 + 0.1 * place, "tokens": 10}
                    for place, name in enumerate(quantization.FORMATS)
                }
            },
            "moved": {
                "large": {
                    name: {"kl": 0.0123, "logit_error": 0.05, "same_first": 0.875, "positions": 8}
                    for name in quantization.FORMATS
                }
            },
        },
        "results.json",
    )
    assert "| tiny-llama | 10 | 2.0000 | 2.1000 (+5.00 %) | 2.2000 (+10.00 %)" in page
    assert "| large | int4 | 0.012 | 5.00% | 87.5% of 8 |" in page
