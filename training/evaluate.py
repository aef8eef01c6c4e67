"""Share of sampled sentences that the grammar derives:  ``python -m training.evaluate tiny-llama``."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from training.data import generate_collection
from training.stories import parses, sentences
from training.tokenizer import CONTEXT, END, EOS

LATE_POSITION = 1500  # tokens of context before the first sampled one
_NEW_TOKENS = 280
_BATCH = 16


def evaluate(folder: Path, seed: int, samples: int = 64) -> dict[str, dict[str, float]]:
    """Parse rates of ``samples`` texts each, sampled with the checkpoint's generation settings.

    "early" texts begin at the start of the context, "late" ones after ``LATE_POSITION`` tokens of other stories, and
    "chat" ones answer a request for a story.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    rng = Random(f"{seed}/evaluation")
    request = [{"role": "user", "content": "Tell me a story about a fox named Lily."}]
    chat = tokenizer.apply_chat_template(request, add_generation_prompt=True, tokenize=False)
    chat_ids = tokenizer.encode(chat, add_special_tokens=False)
    prompts = {
        "early": [[tokenizer.bos_token_id]] * samples,
        "late": [late_prompt(rng, tokenizer) for _ in range(samples)],
        "chat": [chat_ids] * samples,
    }
    return {kind: parse_rate(sample(model, tokenizer, ids)) for kind, ids in prompts.items()}


def late_prompt(rng: Random, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Token ids of complete stories, a little more than ``LATE_POSITION`` of them; the next story may begin."""
    count = 1
    while True:
        ids = tokenizer.encode(generate_collection(Random(rng.random()), count) + "\n\n", verbose=False)
        if LATE_POSITION < len(ids) <= CONTEXT - _NEW_TOKENS:
            return ids
        count = count % 12 + 1


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]) -> list[str]:
    """The continuation of each prompt, up to its end or to ``_NEW_TOKENS`` tokens."""
    texts = []
    for first in range(0, len(prompts), _BATCH):
        batch = prompts[first : first + _BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in batch])
        outputs = model.generate(ids, attention_mask=(ids != tokenizer.pad_token_id).long(),
                                 max_new_tokens=_NEW_TOKENS, top_k=0)  # fmt: skip
        texts += tokenizer.batch_decode(outputs[:, width:])
    return texts


def parse_rate(texts: list[str]) -> dict[str, float]:
    """Returns how many sentences of ``texts`` parse. The last one of a text that did not end by itself may be cut
    off.
    """
    found = []
    for text in texts:
        ended = EOS in text or END in text
        found += sentences(text) if ended else sentences(text)[:-1]
    parsed = sum(map(parses, found))
    return {"sentences": len(found), "parsed": parsed, "rate": round(parsed / max(1, len(found)), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint, e.g. fastgen/models/builtin/tiny-llama")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=64)
    arguments = parser.parse_args()
    for kind, rates in evaluate(arguments.folder, arguments.seed, arguments.samples).items():
        print(kind, rates)


if __name__ == "__main__":
    main()
