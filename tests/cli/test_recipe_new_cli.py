"""``fastgen recipe new`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastgen.models.recipe.recipe import load_recipe
from tests.cli.conftest import Run
from tests.recipe_tools.renamed import rename
from tests.recipe_tools.tiny_checkpoints import make


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("phi")
    make("phi", at / "published")
    return rename(at / "published", at / "renamed")


def test_it_writes_a_recipe_and_tells_what_to_answer(run: Run, directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "herring.yaml"
    finished = run("recipe", "new", str(directory), "--output", str(file))
    assert finished.status == 0, finished.err
    assert load_recipe(file).architectures == ("HerringForCausalLM",)
    assert "nearest recipe: phi, which explains 47 of 47 tensors" in finished.out
    command = f"fastgen verify {directory} --recipe {file} --reference FILE.py:FUNCTION"
    assert finished.out.endswith(f"then run: {command}\n")
    assert "body.blocks.{layer}.attend.query: bias, weight" in finished.out
    assert "blocks.0" not in finished.out


def test_an_architecture_that_transformers_knows_is_verified_without_a_module(run: Run, tmp_path: Path) -> None:
    make("phi", tmp_path / "phi")
    file = tmp_path / "my phi.yaml"
    finished = run("recipe", "new", str(tmp_path / "phi"), "--output", str(file))
    assert finished.out.endswith(f"then run: fastgen verify {tmp_path / 'phi'} --recipe '{file}' --this-config\n")


def test_an_architecture_that_has_a_recipe_is_said_to_have_it(run: Run, directory: Path, tmp_path: Path) -> None:
    make("phi", tmp_path / "phi")
    printed = run("recipe", "new", str(tmp_path / "phi"), "--output", str(tmp_path / "new.yaml")).out
    assert printed.startswith("the recipe phi is for this architecture already: without --recipe the checkpoint is ")
    other = run("recipe", "new", str(directory), "--output", str(tmp_path / "other.yaml")).out
    assert other.startswith("nearest recipe: phi")


def test_a_key_that_nothing_reads_keeps_the_model_from_being_loaded(run: Run, directory: Path, tmp_path: Path) -> None:
    config = json.loads((directory / "config.json").read_text()) | {"warp_factor": 3}
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "model.safetensors").hardlink_to(directory / "model.safetensors")
    file = tmp_path / "herring.yaml"
    printed = run("recipe", "new", str(copy), "--output", str(file)).out
    line = next(each for each in printed.splitlines() if each.startswith("read by nothing, so the checkpoint cannot"))
    refused = run("info", str(copy), "--recipe", str(file))
    assert refused.status == 1
    for key in line.partition(": ")[2].split(", "):
        assert f"- {key} is not known to the recipe" in refused.err
    assert "- warp_factor is not known" in refused.err
    assert refused.err.endswith("or allow it once with --allow-config-key\n")


def test_as_json(run: Run, directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "herring.yaml"
    printed = json.loads(run("recipe", "new", str(directory), "--output", str(file), "--json").out)
    assert printed["text"] == file.read_text()
    assert printed["own"] is None
    assert printed["nearest"] == {"name": "phi", "explained_tensors": 47, "num_tensors": 47}
    assert printed["unclaimed_tensors"] == printed["missing_tensors"] == []


def test_a_file_is_overwritten_only_by_force(run: Run, directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    refused = run("recipe", "new", str(directory), "-o", str(file))
    assert refused.status == 1
    assert "--force" in refused.err
    assert file.read_text() == "mine"
    assert run("recipe", "new", str(directory), "-o", str(file), "--force").status == 0
    assert load_recipe(file).name == "herring"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "config.json"),
        ({"config.json": b"{}"}, "contains none of the weight files"),
        ({"config.json": b"{}", "model.safetensors": b"\x10\x00\x00\x00\x00\x00\x00\x00{"}, "damaged|truncated"),
        ({"config.json": b"{", "model.safetensors": b""}, "JSON"),
    ],
)
def test_bad_input_is_an_error(files: dict[str, bytes], message: str, run: Run, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    finished = run("recipe", "new", str(tmp_path), "-o", str(tmp_path / "x.yaml"))
    assert finished.status == 1
    assert any(word in finished.err for word in message.split("|")), finished.err
    assert not (tmp_path / "x.yaml").exists()


def test_a_file_is_not_looked_for_on_the_hub(run: Run, directory: Path, tmp_path: Path) -> None:
    finished = run("recipe", "new", str(directory / "config.json"), "-o", str(tmp_path / "x.yaml"))
    assert finished.status == 1
    assert "it is one file of a model; give the directory" in finished.err


def test_a_hub_id_without_a_network_is_told(run: Run, tmp_path: Path) -> None:
    finished = run("recipe", "new", "someone/something", "-o", str(tmp_path / "x.yaml"))
    assert finished.status == 1
    assert "fetching its headers" in finished.err
    assert "Traceback" not in finished.err
