"""The training script: its schedule, what a row counts, and that an interrupted run ends like an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from training import train as script
from training.data import recallable
from training.evaluate import parse_rate
from training.models import EMBEDDING_STD, sinusoids
from training.train import Phase, Schedule

SCHEDULE = Schedule(phases=(Phase(3, 2, 16, recall_weight=2.0), Phase(1, 1, 32)), warmup_steps=1, save_every=2)


def test_schedule() -> None:
    assert SCHEDULE.steps == 4
    assert [SCHEDULE.phase(step).length for step in range(4)] == [16, 16, 16, 32]
    assert [SCHEDULE.rate(step) for step in range(4)] == [1.0, 1.0, 1.0, 0.5]


def test_recallable_targets_are_known_words_said_before() -> None:
    inputs = torch.tensor([[5, 6, 7, 5, 9]])
    targets = torch.tensor([[6, 7, 5, 9, 6]])
    assert recallable(inputs, targets, torch.tensor([5, 6, 9])).tolist() == [[False, False, True, False, True]]


def test_sinusoids_depend_on_distance_only() -> None:
    vectors = sinusoids(100, 32)
    products = vectors @ vectors.T
    torch.testing.assert_close(products.diagonal(7), products[0, 7].expand(93), rtol=1e-4, atol=1e-5)
    assert vectors.pow(2).mean().sqrt().item() == pytest.approx(EMBEDDING_STD, rel=1e-3)


def test_parse_rate_leaves_out_only_what_was_cut_off() -> None:
    texts = ["Lily loved to dance. Lily loved.<|endoftext|><|pad|>", "Lily loved to sing. Lily lo"]
    assert parse_rate(texts) == {"sentences": 3, "parsed": 2, "rate": 0.6667}


def test_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(script.BUILTIN / "tiny-opt")
    monkeypatch.setattr(script, "build_tokenizer", lambda seed: tokenizer)
    monkeypatch.setattr(script, "evaluate", lambda folder, seed: {})
    straight = _train(tmp_path / "straight", monkeypatch)

    undisturbed = script.training_batch

    def interrupted(name: str, rows: int, length: int, tokenizer: object) -> tuple[torch.Tensor, torch.Tensor]:
        if name == "0/3":
            raise KeyboardInterrupt
        return undisturbed(name, rows, length, tokenizer)

    monkeypatch.setattr(script, "training_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path / "resumed", monkeypatch)
    assert (tmp_path / "resumed" / "unfinished" / "tiny-opt.pt").exists()
    monkeypatch.setattr(script, "training_batch", undisturbed)
    resumed = _train(tmp_path / "resumed", monkeypatch)

    assert not (tmp_path / "resumed" / "unfinished" / "tiny-opt.pt").exists()
    assert resumed["loss_curve"][-1]["step"] == straight["loss_curve"][-1]["step"] == 4
    assert resumed["sha256"] == straight["sha256"]


def _train(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    for name in ("BUILTIN", "RESULTS", "UNFINISHED"):
        monkeypatch.setattr(script, name, root / name.lower())
    script.train("tiny-opt", SCHEDULE)
    return json.loads((root / "results" / "tiny-opt.json").read_text())
