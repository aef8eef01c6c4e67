"""The JSON files of a tokenizer cannot make transformers read a file that is not the checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import CheckpointError
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.runtime.text.tokenizer_files import check_tokenizer_files
from fastgen.runtime.text.tokenizer_loading import load_tokenizer

CONFIG, TOKENS = "tokenizer_config.json", "special_tokens_map.json"


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """A file of this machine beside the checkpoint, with a line that no client may see."""
    file = tmp_path / "secret"
    file.write_text("the password\nmore\n")
    return str(file)


def checkpoint(tmp_path: Path, **files: dict[str, Any]) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("name", [CONFIG, TOKENS])
@pytest.mark.parametrize("key", ["vocab", "merges", "gguf_file", "vocab_file", "model_path", "rewriting_rules"])
def test_a_key_that_names_a_file_is_refused_with_file_and_key(tmp_path: Path, secret: str, name: str, key: str) -> None:
    """Several classes read the value of ``vocab`` as a file; the lines of this one would be the texts of tokens."""
    files: dict[str, dict[str, Any]] = {"tokenizer_config": {"tokenizer_class": "BertTokenizer"}}
    files.setdefault(name.removesuffix(".json"), {})[key] = secret
    directory = checkpoint(tmp_path, **files)
    with pytest.raises(CheckpointError, match=f"{name}: '{key}' "):
        load_tokenizer(directory, {"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"sp_model_kwargs": {"model_file": "/etc/passwd"}}, "sp_model_kwargs.model_file"),
        ({"more": [{"vocab": "/etc/passwd"}]}, "more.vocab"),
        ({"more": {"tokenizer_file": "/etc/passwd"}}, "more.tokenizer_file"),
        ({"vocab": 0}, "vocab"),  # a file that the server has open
        ({"init_inputs": ["/etc/passwd"]}, "init_inputs"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.0.json", "../other/tokenizer.5.0.0.json"]}, "fast_tokenizer_files"),
        ({"fast_tokenizer_files": ["/tokenizer.5.0.0.json"]}, "fast_tokenizer_files"),
    ],
)
def test_so_is_one_inside_another_and_an_argument_without_a_name(
    tmp_path: Path, content: dict[str, Any], place: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{CONFIG}: '{place}' "):
        check_tokenizer_files(checkpoint(tmp_path, tokenizer_config=content))


def test_what_published_tokenizers_have_is_taken(tmp_path: Path, secret: str) -> None:
    """Places of other machines are common, under keys in whose place transformers uses the directory's own files."""
    config = {
        "init_inputs": [],
        "name_or_path": "/elsewhere/model",
        "special_tokens_map_file": "/elsewhere/cache/transformers/0123",
        "tokenizer_file": secret,
        "vocab_file": None,
        "merges_file": None,
        "fast_tokenizer_files": ["tokenizer.4.0.0.json"],
        "vocab_size": 32000,
        "chat_template": [{"name": "default", "template": "{{ vocab }}"}],
        "additional_special_tokens": ["<file>", "<path>"],
    }
    tokens = {"bos_token": {"content": "<s>", "lstrip": False}, "image_token": "<image>", "extra_special_tokens": []}
    directory = checkpoint(tmp_path, tokenizer_config=config, special_tokens_map=tokens)
    check_tokenizer_files(directory)
    for source in BUILTINS.values():
        check_tokenizer_files(source)
    (directory / "tokenizer.4.0.0.json").write_bytes((BUILTINS["tiny-llama"] / "tokenizer.json").read_bytes())
    assert "the password" not in load_tokenizer(directory, {}).get_vocab()
