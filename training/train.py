"""Trains the built-in models:  ``python -m training.train tiny-llama``  (or ``all``).

Writes the checkpoint to ``fastgen/models/builtin/<name>/`` and an account of the run to
``training/results/<name>.json``.  A run that was interrupted continues from its last saved step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from training.data import IGNORED, recallable, recalled_words, training_batch
from training.evaluate import evaluate
from training.models import MODEL_NAMES, build_model
from training.tokenizer import CONTEXT, END, build_tokenizer

ROOT = Path(__file__).resolve().parents[1]
BUILTIN = ROOT / "fastgen" / "models" / "builtin"
RESULTS = ROOT / "training" / "results"
UNFINISHED = ROOT / "training" / "unfinished"


@dataclass(frozen=True)
class Phase:
    """A stretch of training steps with batches of one shape."""

    steps: int
    rows: int
    length: int  # tokens per row
    recall_weight: float = 1.0  # of targets that were said before (see ``training.data.recallable``)


@dataclass(frozen=True)
class Schedule:
    """The length of the training, and its learning rates.

    Rows grow from phase to phase.  The first are very short and cheap; the last are as long as the context, so that
    a model meets distances and positions that short rows never show.  Names and pronouns that can be looked up in
    the text so far are few among all tokens, and at their natural weight they are learned last; weighing them more
    makes a model attend to them within the first hundred steps.
    """

    seed: int = 0
    phases: tuple[Phase, ...] = (
        Phase(250, 32, 64, recall_weight=8.0),
        Phase(450, 8, 256, recall_weight=4.0),
        Phase(130, 1, CONTEXT),
    )
    warmup_steps: int = 40
    matrix_lr: float = 0.03  # Muon, for the matrices inside the layers but those of queries and keys
    query_key_lr: float = 3e-3  # AdamW
    position_lr: float = 3e-4  # AdamW, for learned positions
    other_lr: float = 3e-3  # AdamW, for embeddings, head, norms and biases
    weight_decay: float = 0.01  # Muon
    max_grad_norm: float = 1.0
    save_every: int = 100  # steps

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase(self, step: int) -> Phase:
        """The phase that ``step`` belongs to."""
        ends = accumulate(phase.steps for phase in self.phases)
        return next(phase for phase, end in zip(self.phases, ends, strict=True) if step < end)

    def rate(self, step: int) -> float:
        """Share of the full learning rate: a short warm-up, a plateau, and a linear decline in the second half."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        return warmup * min(1.0, 2 * (1 - step / self.steps))


# Full attention has to relearn how to spread over more tokens each time the rows grow; a sliding window does not.  With
# learned positions that takes longest, hence the phase in between.
SCHEDULES = {
    "tiny-llama": Schedule(
        phases=(
            Phase(300, 32, 64, recall_weight=8.0),
            Phase(700, 8, 256, recall_weight=4.0),
            Phase(220, 1, CONTEXT),
        )
    ),
    "tiny-mistral": Schedule(),
    "tiny-opt": Schedule(
        phases=(
            Phase(400, 32, 64, recall_weight=8.0),
            Phase(1100, 8, 256, recall_weight=3.0),
            Phase(220, 2, 1024, recall_weight=2.0),
            Phase(200, 1, CONTEXT),
        )
    ),
}


def train(name: str, schedule: Schedule) -> None:
    """Trains, saves and evaluates one built-in model."""
    torch.manual_seed(schedule.seed)
    tokenizer = build_tokenizer(schedule.seed)
    model = build_model(name, tokenizer)
    optimizers = _build_optimizers(model, schedule)
    progress: dict[str, Any] = {"step": 0, "seconds": 0.0, "loss_curve": []}
    unfinished = UNFINISHED / f"{name}.pt"
    if unfinished.exists():
        progress = _load(unfinished, model, optimizers)

    words = recalled_words(tokenizer)
    recent: list[float] = []
    model.train()
    for step in range(progress["step"], schedule.steps):
        start = time.perf_counter()
        phase = schedule.phase(step)
        batch = training_batch(f"{schedule.seed}/{step}", phase.rows, phase.length, tokenizer)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * schedule.rate(step)
        weights = None
        if phase.recall_weight != 1.0:
            weights = torch.where(recallable(*batch, words), phase.recall_weight, 1.0)
        recent.append(_train_step(model, optimizers, batch, weights, schedule, step))

        progress["step"] = step + 1
        progress["seconds"] += time.perf_counter() - start
        if progress["step"] % 20 == 0 or progress["step"] == schedule.steps:
            loss = sum(recent) / len(recent)
            recent.clear()
            progress["loss_curve"].append({"step": progress["step"], "loss": round(loss, 4)})
            print(f"{name} step {progress['step']} loss {loss:.4f} {progress['seconds']:.0f} s", flush=True)
        if progress["step"] % schedule.save_every == 0:
            _save(unfinished, model, optimizers, progress)

    save_checkpoint(model, tokenizer, BUILTIN / name)
    _write_results(name, schedule, model, progress)
    unfinished.unlink(missing_ok=True)


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes weights (bfloat16), configuration and tokenizer in the layout of a Hugging Face model."""
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for the owner alone, unlike its neighbours


def _build_optimizers(model: PreTrainedModel, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, where it learns faster per step, and AdamW for the rest.

    Queries and keys belong to the rest: their product grows with the square of Muon's large updates, and attention
    that has become one-hot stops learning.
    """
    matrices, queries_and_keys, positions, others = [], [], [], []
    for name, parameter in model.named_parameters():
        if "embed_positions" in name:
            positions.append(parameter)
        elif parameter.ndim != 2 or ".layers." not in name:
            others.append(parameter)
        elif ".q_proj." in name or ".k_proj." in name:
            queries_and_keys.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"params": queries_and_keys, "lr": schedule.query_key_lr},
        {"params": positions, "lr": schedule.position_lr},
        {"params": others, "lr": schedule.other_lr},
    ]
    optimizers = [
        torch.optim.Muon(matrices, lr=schedule.matrix_lr, weight_decay=schedule.weight_decay),
        torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return optimizers


def _train_step(
    model: PreTrainedModel,
    optimizers: list[torch.optim.Optimizer],
    batch: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor | None,
    schedule: Schedule,
    step: int,
) -> float:
    """One update on ``batch`` (inputs, targets) with ``weights`` of the targets; all of shape (rows, length).

    Returns the unweighted mean loss per token in nats.
    """
    inputs, targets = batch
    logits = model(input_ids=inputs, use_cache=False, **_positions(model, inputs, schedule.seed + step)).logits
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    counted = (targets != IGNORED).float().flatten()
    weights = counted if weights is None else counted * weights.flatten()
    (losses @ weights / weights.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return (losses.detach() @ counted / counted.sum()).item()


def _positions(model: PreTrainedModel, inputs: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Positions for models that learn one vector per position: rows begin anywhere in the context, often at 0.

    Short rows would otherwise leave the vectors of late positions untrained.  Rotary models see only distances.
    """
    if model.config.model_type != "opt":
        return {}
    rows, length = inputs.shape
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randint(0, CONTEXT - length + 1, (rows, 1), generator=generator)
    offsets[torch.rand(rows, 1, generator=generator) < 0.2] = 0
    return {"position_ids": offsets + torch.arange(length)}


def _save(path: Path, model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], progress: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save([progress, model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]], partial)
    partial.replace(path)


def _load(path: Path, model: PreTrainedModel, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    progress, weights, states = torch.load(path, weights_only=True)
    model.load_state_dict(weights)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    return progress


def _write_results(name: str, schedule: Schedule, model: PreTrainedModel, progress: dict[str, Any]) -> None:
    weights = (BUILTIN / name / "model.safetensors").read_bytes()
    results = {
        "model": name,
        "date": datetime.now(UTC).date().isoformat(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
        "schedule": asdict(schedule),
        "tokens": sum(phase.steps * phase.rows * phase.length for phase in schedule.phases),
        "training_seconds": round(progress["seconds"], 1),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "evaluation": evaluate(BUILTIN / name, schedule.seed),
        "loss_curve": progress["loss_curve"],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({key: value for key, value in results.items() if key != "loss_curve"}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*MODEL_NAMES, "all"])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in MODEL_NAMES if arguments.name == "all" else [arguments.name]:
        train(name, SCHEDULES[name])


if __name__ == "__main__":
    main()
