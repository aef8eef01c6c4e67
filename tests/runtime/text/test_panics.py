"""A panic of the tokenizer's library, which is no ``Exception``, ends what asked for it and nothing else."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastgen.errors import CheckpointError, InvalidArgumentError
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.detokenizer import TokenDecoder
from fastgen.runtime.text.panics import panics_as_errors
from fastgen.runtime.text.tokenizer_checks import check_tokenizer
from fastgen.runtime.text.tokenizer_loading import load_tokenizer
from tests.runtime.checkpoints import save_tokenizer

# A trie of one entry that leads to none.
NOWHERE = base64.b64encode(b"\4\0\0\0" + b"\0\0\0\0" + b"x\0").decode()


def codec_with(**parts: Any) -> TextCodec:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, " ": 1, "": 2, "<unk>": 3}, unk_token="<unk>"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    check_tokenizer(fast)
    return TextCodec(fast, eos_token_ids=frozenset(), default_sampling=SamplingParams())


def test_a_text_that_cannot_be_encoded_is_refused() -> None:
    codec = codec_with(pre_tokenizer=pre_tokenizers.FixedLength(length=0))
    with pytest.raises(InvalidArgumentError, match="tokenizer cannot encode this text: chunk size must be non-zero"):
        codec.encode("abc")


def test_so_is_one_that_the_library_refuses_without_a_panic() -> None:
    codec = codec_with(model=models.WordLevel({"a": 0}, unk_token="<none>"))
    with pytest.raises(InvalidArgumentError, match="tokenizer cannot encode this text: WordLevel error: Missing"):
        codec.encode("b")


def test_tokens_that_cannot_be_decoded_are_an_error() -> None:
    codec = codec_with()
    codec.tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    with pytest.raises(RuntimeError, match="out of bounds"):
        TokenDecoder(codec.tokenizer).decode([2])


def test_a_checkpoint_whose_rules_fail_when_they_are_read_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": NOWHERE}
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 300, "content": "abc", "normalized": True})
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded: index out of bounds"):
        load_tokenizer(tmp_path, {})


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_is_no_panic_is_left_as_it_is(error: type[BaseException]) -> None:
    with pytest.raises(error), panics_as_errors():
        raise error
