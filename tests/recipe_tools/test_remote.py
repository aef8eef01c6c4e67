"""A model on the hub is read by its headers alone, and errors say why it cannot be read."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import parse_local_safetensors_file_metadata
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    RepositoryNotFoundError,
)

from fastgen.errors import ModelNotFoundError
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.recipe_tools.propose import remote

MODEL = BUILTINS["tiny-llama"]


def refused(kind: type[Exception]) -> Exception:
    """Returns an error of the hub without the HTTP response that its constructor needs."""
    error = kind.__new__(kind)
    Exception.__init__(error, "no")
    return error


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the hub by a built-in; collects the names of downloaded files."""
    names: list[str] = []

    def download(repository: str, name: str) -> str:
        names.append(name)
        return str(MODEL / name)

    def metadata(repository: str) -> Any:
        files = {file.name: parse_local_safetensors_file_metadata(file) for file in MODEL.glob("*.safetensors")}
        return SimpleNamespace(files_metadata=files)

    monkeypatch.setattr(remote, "hf_hub_download", download)
    monkeypatch.setattr(remote, "get_safetensors_metadata", metadata)
    return names


def test_only_headers_are_fetched(fetched: list[str]) -> None:
    config, shapes = remote.read_remote("someone/llama")
    opened = Checkpoint.open(MODEL)
    assert config == opened.config
    assert shapes == {name: header.shape for name, header in opened.tensors.items()}
    assert fetched == ["config.json"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (refused(GatedRepoError), "is gated: accept its terms"),
        (refused(RepositoryNotFoundError), "does not exist, or it is private"),
        (refused(EntryNotFoundError), "hf download someone/llama --local-dir"),
        (NotASafetensorsRepoError("no"), "hf download someone/llama --local-dir"),
        (LocalEntryNotFoundError("no connection"), "failed (no connection), and the cache"),
        (ConnectionError("refused"), "failed (refused), and the cache"),
    ],
)
def test_errors_say_why_a_model_cannot_be_read(
    error: Exception, said: str, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(remote, "get_safetensors_metadata", fail)
    with pytest.raises(ModelNotFoundError) as caught:
        remote.read_remote("someone/llama")
    assert said in str(caught.value)


def test_a_name_that_is_not_a_hub_id_is_refused() -> None:
    with pytest.raises(ModelNotFoundError, match="not a hub id of the form owner/name"):
        remote.read_remote("some/where/else")


def test_without_a_network_the_cached_copy_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = shutil.copytree(MODEL, tmp_path / "copy")
    monkeypatch.setattr(remote, "snapshot_download", lambda repository, local_files_only: str(copy))
    _, shapes = remote.read_remote("someone/llama")  # the tests run without one
    assert shapes.keys() == Checkpoint.open(MODEL).tensors.keys()
