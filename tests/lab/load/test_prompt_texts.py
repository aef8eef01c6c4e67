"""Texts that stand for drawn tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fastgen.lab.load.formats import text_of
from fastgen.lab.load.tokenizer import open_tokenizer
from fastgen.lab.workloads.request import PlannedRequest


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mistral", "tiny-opt"])
def test_a_text_has_the_planned_number_of_tokens(model: str) -> None:
    codec, draws = open_tokenizer(model), random.Random(0)
    changed = 0
    for _ in range(200):
        ids = tuple(draws.randrange(len(codec.tokenizer)) for _ in range(draws.randrange(1, 80)))
        request = PlannedRequest(prompt_ids=ids, num_new_tokens=1)
        assert abs(len(codec.encode(text_of(request, codec))) - len(ids)) <= (1 if len(ids) < 8 else 0)
        plain = codec.decode(list(ids))
        changed += len(codec.encode(plain)) != len(ids)
        assert text_of(replace(request, session="a"), codec) == plain, "what follows continues it"
    assert text_of(PlannedRequest(prompt_ids=(), num_new_tokens=1), codec) == ""
    assert changed > 100, "most drawn tokens are encoded to another number"


def test_texts_of_a_shared_beginning_begin_alike() -> None:
    codec, draws = open_tokenizer("tiny-llama"), random.Random(0)
    shared = [draws.randrange(len(codec.tokenizer)) for _ in range(64)]
    encoded = []
    for _ in range(5):
        own = [draws.randrange(len(codec.tokenizer)) for _ in range(32)]
        encoded.append(codec.encode(text_of(PlannedRequest(prompt_ids=[*shared, *own], num_new_tokens=1), codec)))
    num_alike = next(place for place, ids in enumerate(zip(*encoded, strict=True)) if len(set(ids)) > 1)
    assert num_alike > 48
