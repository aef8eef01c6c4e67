"""The tokenizer of a checkpoint is the one that transformers chooses, without its own reading of the config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

import fastgen
from fastgen.errors import CheckpointError
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.runtime.text.tokenizer_loading import load_tokenizer
from tests.runtime.checkpoints import save_checkpoint, save_tokenizer

# Kinds of models to which transformers gives tokenizers of their own, some against what the checkpoint says; and one
# that it does not know.
MODEL_TYPES = ("llama", "mistral", "qwen2", "deepseek_v3", "falcon", "gpt2", "gemma2", "made_up", None)
CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", None)
TEXT = "One day, Zoë's 12 cats  ate\n\n3.5 apples."


def directory_of(path: Path, model_type: str | None, tokenizer_class: str | None) -> tuple[Path, dict[str, Any]]:
    """Returns a directory with the files of a tokenizer and a config that names these, and the config."""
    source = BUILTINS["tiny-llama"]
    shutil.copy(source / "tokenizer.json", path)
    config = {} if model_type is None else {"model_type": model_type}
    (path / "config.json").write_text(json.dumps(config))
    stated = json.loads((source / "tokenizer_config.json").read_text())
    del stated["tokenizer_class"]
    stated |= {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    (path / "tokenizer_config.json").write_text(json.dumps(stated))
    return path, config


@pytest.mark.parametrize("tokenizer_class", CLASSES)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_it_is_the_one_that_transformers_finds_by_itself(
    tmp_path: Path, model_type: str | None, tokenizer_class: str | None
) -> None:
    path, config = directory_of(tmp_path, model_type, tokenizer_class)
    expected = error = None
    try:
        expected = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as raised:
        error = str(raised)
    if expected is None:
        with pytest.raises(CheckpointError) as refused:
            load_tokenizer(path, config)
        assert error is not None
        assert error in str(refused.value)
        return
    found = load_tokenizer(path, config)
    assert type(found) is type(expected)
    assert found.special_tokens_map == expected.special_tokens_map
    assert json.loads(found.backend_tokenizer.to_str()) == json.loads(expected.backend_tokenizer.to_str())


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-opt"])
def test_a_generic_tokenizer_needs_no_class_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing one takes a second: it imports the compiler of torch."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the config was read once more")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    directory = BUILTINS[name]
    config = json.loads((directory / "config.json").read_text())
    tokenizer = load_tokenizer(directory, config)
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT


def test_a_tokenizer_smaller_than_the_vocabulary_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tokenizer(save_checkpoint("llama", tmp_path))
    with fastgen.load(tmp_path, target="torch") as llm:
        num_known = len(AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True))
        num_ids = llm.spec.vocab_size
    (said,) = [record.getMessage() for record in caplog.records if "the tokenizer knows" in record.getMessage()]
    assert said.startswith(
        f"the tokenizer knows {num_known} of the model's {num_ids} token ids; the other {num_ids - num_known} have"
    )
