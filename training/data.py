"""Training rows: stories, collections of stories and conversations, packed into windows of equal length."""

from __future__ import annotations

from dataclasses import asdict
from random import Random

import torch
from transformers import PreTrainedTokenizerFast

from training.stories import RECALLED_WORDS, generate_chat, generate_story
from training.tokenizer import BOS, EOS

IGNORED = -100  # a target that does not count, as in torch's cross entropy
_STORY_SHARE, _COLLECTION_SHARE = 0.5, 0.15  # of the documents; the rest are conversations
_MAX_COLLECTION = 12  # stories; more than fit the context, so that a late position can still be mid-collection


def generate_document(rng: Random, tokenizer: PreTrainedTokenizerFast) -> str:
    """One document from beginning-of-text to end-of-text, special tokens written out."""
    draw = rng.random()
    if draw < _STORY_SHARE:
        return BOS + generate_story(rng) + EOS
    if draw < _STORY_SHARE + _COLLECTION_SHARE:
        return BOS + generate_collection(rng, rng.randint(2, _MAX_COLLECTION)) + EOS
    messages = [asdict(message) for message in generate_chat(rng)]
    return tokenizer.apply_chat_template(messages, tokenize=False) + EOS


def generate_collection(rng: Random, count: int) -> str:
    """``count`` stories one after the other, separated by blank lines."""
    return "\n\n".join(generate_story(rng) for _ in range(count))


def training_row(name: str, length: int, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """``length`` tokens of documents that follow each other, and for each the token to predict; ``name`` decides which.

    Half of the rows start with a document, as generation does, and half somewhere inside one, so that the ends of
    documents longer than a row are seen too.
    """
    rng = Random(name)
    ids: list[int] = []
    skip = 0
    while len(ids) < skip + length + 1:
        document = generate_document(rng, tokenizer)
        tokens = tokenizer.encode(document, add_special_tokens=False, verbose=False)
        if not ids and rng.random() < 0.5:
            skip = rng.randrange(len(tokens))
        ids += tokens
    targets = _mask_prompts(ids, tokenizer)
    return ids[skip : skip + length], targets[skip + 1 : skip + length + 1]


def training_batch(
    name: str, rows: int, length: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target token ids, each of shape (rows, length)."""
    pairs = [training_row(f"{name}/{row}", length, tokenizer) for row in range(rows)]
    return torch.tensor([inputs for inputs, _ in pairs]), torch.tensor([targets for _, targets in pairs])


def _mask_prompts(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """``ids`` with ``IGNORED`` for what others say, so that a model never speaks for the user or the system."""
    others = set(tokenizer.convert_tokens_to_ids(["<|system|>", "<|user|>"]))
    own = tokenizer.convert_tokens_to_ids("<|assistant|>")
    targets = []
    masked = False
    for token in ids:
        masked = masked or token in others
        targets.append(IGNORED if masked else token)
        masked = masked and token != own
    return targets


def recalled_words(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Ids of those ``RECALLED_WORDS`` that are one token inside a sentence."""
    words = [tokenizer.encode(" " + word, add_special_tokens=False) for word in sorted(RECALLED_WORDS)]
    return torch.tensor([ids[0] for ids in words if len(ids) == 1])


def recallable(inputs: torch.Tensor, targets: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Returns which ``targets`` are among ``words`` and were said before in their row; shape (rows, length)."""
    length = inputs.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    said = ((targets[:, :, None] == inputs[:, None, :]) & earlier).any(-1)
    return said & torch.isin(targets, words)
