"""Symbolic links in a checkpoint: none leads to a file elsewhere on the machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import fastgen
from fastgen.errors import CheckpointError
from fastgen.models.checkpoint import hub
from fastgen.models.checkpoint.builtins import BUILTINS


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the machine that the checkpoint has no business with."""
    file = tmp_path / "secret"
    file.write_text("root:x:0:0")
    return file


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(BUILTINS["tiny-llama"], tmp_path / "cloned" / "checkpoint")


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "fastgen.yaml", "model.safetensors", "pytorch_model.bin"),
        *("model.safetensors.index.json", "pytorch_model.bin.index.json", "model-00001-of-00002.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "merges.txt", "tokenizer.model", "added_tokens.json"),
        *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"),
    ],
)
def test_a_link_to_a_file_elsewhere_is_refused(checkpoint: Path, secret: Path, name: str) -> None:
    file = checkpoint / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(os.path.relpath(secret, file.parent))
    with pytest.raises(CheckpointError) as caught:
        fastgen.load(checkpoint)
    assert str(caught.value).startswith(f"{file}: is a link to {secret}, outside of the checkpoint")
    assert "put a copy or a hard link of it in this place" in str(caught.value)


def test_a_link_to_a_device_is_refused(checkpoint: Path) -> None:
    """Reading it would never end."""
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    (checkpoint / "generation_config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="is a link to /dev/zero, outside"):
        hub.locate(checkpoint)


def test_a_folder_of_templates_elsewhere_is_refused(checkpoint: Path, secret: Path) -> None:
    (checkpoint / "additional_chat_templates").symlink_to(secret.parent)
    with pytest.raises(CheckpointError, match=f"is a link to {secret}, outside"):
        hub.locate(checkpoint)


def test_links_inside_the_checkpoint_are_followed(checkpoint: Path, tmp_path: Path) -> None:
    """Mounted volumes have such links. The checkpoint itself may be reached by a link, too."""
    (checkpoint / "..data").mkdir()
    (checkpoint / "config.json").rename(checkpoint / "..data" / "config.json")
    (checkpoint / "config.json").symlink_to("..data/config.json")
    (checkpoint / "logs").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(checkpoint)
    assert hub.locate(tmp_path / "link") == tmp_path / "link"
    assert hub.locate(checkpoint) == checkpoint


def test_the_hubs_cache_is_followed_to_the_blobs_of_its_repository_alone(checkpoint: Path, secret: Path) -> None:
    repository = checkpoint.parent / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "0a1b", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in checkpoint.iterdir():
        shutil.copy(file, blobs / f"of {file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/of {file.name}")
    assert hub.locate(snapshot) == snapshot
    (snapshot / "vocab.txt").symlink_to("../../blobs/leads out")
    (blobs / "leads out").symlink_to(secret)
    with pytest.raises(CheckpointError, match=f"vocab.txt: is a link to {secret}, outside"):
        hub.locate(snapshot)


def test_a_clone_that_looks_like_the_hubs_cache_is_not_followed_out(checkpoint: Path, secret: Path) -> None:
    snapshot = checkpoint.parent / "snapshots" / "x"
    checkpoint.rename(snapshot.parent.parent / "moved")
    snapshot.parent.mkdir()
    (snapshot.parent.parent / "moved").rename(snapshot)
    (snapshot.parent.parent / "blobs").symlink_to(secret.parent)
    (snapshot / "vocab.txt").symlink_to("../../blobs/secret")
    with pytest.raises(CheckpointError, match=f"vocab.txt: is a link to {secret}, outside"):
        hub.locate(snapshot)
