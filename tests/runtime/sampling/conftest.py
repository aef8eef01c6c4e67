"""A tokenizer that can write anything, and formats compiled for it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from fastgen.runtime.sampling.structured_output import Grammars
from tests.runtime.constrained import EOS, VOCAB_SIZE, save_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
