"""The tokenizer that a load is measured with, of a model that another process serves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fastgen.errors import CheckpointError, FastgenError, ModelNotFoundError
from fastgen.lab.load.tokenizer import open_tokenizer
from fastgen.models.checkpoint import hub
from fastgen.models.checkpoint.builtins import BUILTINS


def of_a_builtin(directory: Path) -> Path:
    for file in BUILTINS["tiny-llama"].iterdir():
        if "token" in file.name:
            shutil.copy(file, directory)
    return directory


def test_a_builtin_a_directory_and_a_repository_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, asked = of_a_builtin(tmp_path), list[str]()

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert not any("safetensors" in pattern or pattern.endswith(".bin") for pattern in allow_patterns)
        return str(directory)

    monkeypatch.setattr(hub, "snapshot_download", download)
    expected = open_tokenizer("tiny-llama").encode("Once upon a time")
    assert len(expected) > 2
    assert open_tokenizer(str(directory)).encode("Once upon a time") == expected
    assert open_tokenizer("somebody/something").encode("Once upon a time") == expected
    assert asked == ["somebody/something"]


def test_a_repository_s_tokenizer_is_checked_as_a_served_model_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = of_a_builtin(tmp_path)
    stated = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(stated | {"vocab_file": "/etc/hostname"}))
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(directory))
    with pytest.raises(CheckpointError, match="vocab_file"):
        open_tokenizer("somebody/something")


def test_a_directory_without_one_and_a_name_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FastgenError, match="has no tokenizer"):
        open_tokenizer(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"the tokenizer of 'a name .* cannot be had: .* not a hub id"):
        open_tokenizer("a name of/no/thing")
