"""Models to plan with: names, files, and configurations as they were published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fastgen.errors import ModelNotFoundError
from fastgen.lab import models
from fastgen.lab.models import describe, published_names
from fastgen.models.checkpoint.builtins import BUILTINS
from tests.lab.devices.specs import PUBLISHED


@pytest.mark.parametrize("name", published_names())
def test_published_configurations_are_those_of_the_recipes_tests(name: str) -> None:
    """Whose parameter counts are compared with the published ones."""
    config, _ = {known.lower(): found for known, found in PUBLISHED.items()}[name]
    shipped = json.loads((Path(models.__file__).parent / "published" / f"{name}.json").read_text())
    assert shipped == {key: value for key, value in config.items() if key != "_name_or_path"}
    assert describe(name).spec.num_parameters > 10**9


def test_the_papers_and_the_posts_models_are_published() -> None:
    assert {"llama-2-7b", "llama-2-13b", "llama-2-70b", "mistral-7b-v0.1", "falcon-40b"} <= set(published_names())


def test_a_file_a_directory_a_builtin_and_a_name_describe_a_model(tmp_path: Path) -> None:
    directory = BUILTINS["tiny-llama"]
    specs = [describe(str(each)).spec for each in (directory, directory / "config.json", "tiny-llama")]
    assert specs[0].num_parameters == specs[1].num_parameters == specs[2].num_parameters
    assert describe("Llama-2-13B").spec.num_layers == 40


def test_the_dtype_is_the_configurations_own_or_the_one_that_is_asked_for() -> None:
    assert describe("llama-2-13b").dtype == torch.float16
    assert describe("mistral-7b-v0.2").dtype == torch.bfloat16
    assert describe("llama-2-13b", dtype="float32").dtype == torch.float32


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'gpt-5' is no config.json, .*tiny-llama.* llama-2-70b, .*download"):
        describe("gpt-5")


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[]", "but list")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelNotFoundError, match=f"config.json: .*{message}"):
        describe(str(file))
