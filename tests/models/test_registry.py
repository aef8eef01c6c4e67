"""The search for recipes: the places, their order, and which recipe is used."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import RecipeError, UnknownArchitectureError
from fastgen.models.recipe import search_path
from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.models.registry.registry import find_recipe, list_recipes, named_recipe
from fastgen.models.resolve.resolve import resolve

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
BUILT_IN = sorted(file.stem for file in (Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
LLAMA = {"architectures": ["LlamaForCausalLM"]}
NEW = {"architectures": ["NewForCausalLM"]}


class EntryPoint:
    group = search_path.ENTRY_POINT_GROUP

    def __init__(self, name: str, target: Any):
        self.name, self.target = name, target

    def load(self) -> Any:
        if isinstance(self.target, Exception):
            raise self.target
        return self.target


def variant(directory: Path, name: str, *architectures: str, parent: str = "llama", file: str | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (file or f"{name}.yaml")
    path.write_text(f"name: {name}\nextends: {parent}\narchitectures: [{', '.join(architectures)}]\n")
    return path


def environment(monkeypatch: pytest.MonkeyPatch, *directories: Path) -> None:
    monkeypatch.setenv(search_path.ENVIRONMENT_VARIABLE, os.pathsep.join(map(str, directories)))


def entry_points(monkeypatch: pytest.MonkeyPatch, **targets: Any) -> None:
    points = [EntryPoint(name, target) for name, target in targets.items()]
    monkeypatch.setattr(search_path, "_entry_points", lambda: points)


def test_built_ins() -> None:
    assert [(each.recipe.name, each.origin) for each in list_recipes()] == [(name, "built-in") for name in BUILT_IN]
    for name in ("Llama", "Mistral", "OPT"):
        assert find_recipe({"architectures": [f"{name}ForCausalLM"]}).name == name.lower()
    assert find_recipe({"architectures": ["Unheard", "OPTForCausalLM"]}).name == "opt"


def test_the_installed_package_looks_inside_itself_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fastgen"
    package.mkdir()
    monkeypatch.setattr(search_path, "_PACKAGE", package)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "llama.yaml").write_bytes((RECIPES / "llama.yaml").read_bytes())
    assert named_recipe("llama").file == tmp_path / "recipes" / "llama.yaml"
    (package / "recipes").mkdir()
    (package / "recipes" / "opt.yaml").write_bytes((RECIPES / "opt.yaml").read_bytes())
    assert [each.recipe.file for each in list_recipes()] == [package / "recipes" / "opt.yaml"]


def test_the_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, own, checkpoint = tmp_path / "package", tmp_path / "own", tmp_path / "checkpoint"
    variant(checkpoint, "brought", "LlamaForCausalLM", "NewForCausalLM", file="fastgen.yaml")
    assert find_recipe(LLAMA, checkpoint_dir=checkpoint).name == "llama"
    assert find_recipe(NEW, checkpoint_dir=checkpoint).name == "brought"

    variant(package, "packaged", "LlamaForCausalLM", "NewForCausalLM")
    entry_points(monkeypatch, some=lambda: package)
    assert find_recipe(LLAMA, checkpoint_dir=checkpoint).name == "packaged"
    assert find_recipe(NEW, checkpoint_dir=checkpoint).name == "packaged"

    file = variant(own, "mine", "LlamaForCausalLM")
    environment(monkeypatch, own)
    assert find_recipe(LLAMA, checkpoint_dir=checkpoint).name == "mine"
    assert find_recipe(NEW, checkpoint_dir=checkpoint).name == "packaged"
    assert [(each.recipe.name, each.origin) for each in list_recipes()] == [
        *(("mine", "environment"), ("packaged", "package")),
        *((name, "built-in") for name in BUILT_IN),
    ]

    assert find_recipe(LLAMA, checkpoint_dir=checkpoint, recipe="opt").name == "opt"
    assert find_recipe(LLAMA, checkpoint_dir=checkpoint, recipe=str(file)).name == "mine"
    assert find_recipe(LLAMA, checkpoint_dir=checkpoint, recipe=file).name == "mine"
    assert find_recipe(LLAMA, checkpoint_dir=checkpoint, recipe="checkpoint").name == "brought"
    loaded = load_recipe(file)
    assert find_recipe(NEW, recipe=loaded) is loaded


def test_a_recipe_may_take_the_place_of_the_built_in_it_extends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama.yaml").write_text("name: llama\nextends: llama\nconfig: {max_positions: 7}\n")
    environment(monkeypatch, tmp_path)
    recipe = find_recipe(LLAMA)
    assert recipe.file == tmp_path / "llama.yaml"
    assert recipe.schema.config.max_positions.text == "7"
    mistral = find_recipe({"architectures": ["MistralForCausalLM"]})  # the built-in extends the one beside it
    assert mistral.schema.config.num_layers.text == "num_hidden_layers"
    assert [each.origin for each in list_recipes() if each.recipe.name == "llama"] == ["environment"]


def test_two_claims_at_one_place_are_an_error_naming_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = variant(tmp_path / "a", "one", "NewForCausalLM")
    second = variant(tmp_path / "b", "two", "OtherForCausalLM", "NewForCausalLM")
    environment(monkeypatch, tmp_path / "a", tmp_path / "b")
    with pytest.raises(
        RecipeError, match=r"architecture 'NewForCausalLM'.*; remove one, or choose with recipe=$"
    ) as caught:
        find_recipe(NEW)
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)
    assert find_recipe(NEW, recipe="two").file == second

    third = variant(tmp_path / "b", "one", "ThirdForCausalLM", file="three.yaml")
    for search in (list_recipes, lambda: find_recipe(LLAMA), lambda: named_recipe("one")):
        with pytest.raises(RecipeError, match=r"name 'one'.*; remove or rename one$") as caught:
            search()
        assert str(first) in str(caught.value)
        assert str(third) in str(caught.value)


def test_the_error_about_an_unknown_architecture_suggests_names_and_the_list() -> None:
    with pytest.raises(UnknownArchitectureError, match="LLamaForCausalLM; did you mean 'LlamaForCausalLM'") as caught:
        find_recipe({"architectures": ["LLamaForCausalLM"]})
    assert "`fastgen recipe list`" in str(caught.value)
    assert "OPTForCausalLM" not in str(caught.value)
    assert "?;" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("LamaForCausalLM", "'LlamaForCausalLM'"),
        ("Lama", "'LlamaForCausalLM'"),
        ("LlamaForCausalM", "'LlamaForCausalLM'"),
        ("MistrallForCausalLM", "'MistralForCausalLM' or 'MixtralForCausalLM'"),
        ("UnheardForCausalLM", None),
        ("MambaForCausalLM", None),
        ("FalconMambaForCausalLM", None),
        ("ForCausalLM", None),
        ("XForCausalLM", None),
    ],
)
def test_the_ending_that_all_share_makes_no_two_architectures_alike(asked: str, meant: str | None) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        find_recipe({"architectures": [asked]})
    hint = f"; did you mean {meant}? " if meant else ". "
    assert str(caught.value).startswith(f"no recipe is for {asked}{hint}Write one (docs/recipes.md)")


@pytest.mark.parametrize(
    "config", [{}, {"architectures": None}, {"architectures": []}, {"architectures": "Llama"}, {"architectures": [3]}]
)
def test_a_configuration_without_an_architecture(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match=r"names no architecture.*pass recipe="):
        find_recipe(config, checkpoint_dir=tmp_path)
    assert find_recipe(config, recipe="llama").name == "llama"


def test_the_checkpoints_own_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"it has no fastgen\.yaml"):
        find_recipe(LLAMA, recipe="checkpoint", checkpoint_dir=tmp_path)
    with pytest.raises(RecipeError, match=r"it has no fastgen\.yaml"):
        find_recipe(LLAMA, recipe="checkpoint")
    file = variant(tmp_path, "brought", "NewForCausalLM", file="fastgen.yaml")
    assert find_recipe(NEW, checkpoint_dir=tmp_path).extends == "llama"
    assert find_recipe({}, checkpoint_dir=tmp_path).name == "brought"
    with pytest.raises(RecipeError, match="is Unheard, which its own recipe does not list") as caught:
        find_recipe({"architectures": ["Unheard"]}, checkpoint_dir=tmp_path)
    assert (caught.value.file, caught.value.line) == (str(file), 3)
    file.write_text("name: [")
    assert find_recipe(LLAMA, checkpoint_dir=tmp_path).name == "llama"  # a file that is not needed is not read
    with pytest.raises(RecipeError, match="not valid YAML"):
        find_recipe(NEW, checkpoint_dir=tmp_path)


def test_recipes_selected_by_name_and_by_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe is called 'lama'; did you mean 'llama'"):
        named_recipe("lama")
    for path in (tmp_path / "absent.yaml", str(tmp_path / "absent.yaml"), str(tmp_path / "absent"), "absent.yaml"):
        with pytest.raises(RecipeError, match="cannot be read"):
            named_recipe(path)
    for name in ("", "..", "\0", "*", "[", "name: x"):
        with pytest.raises(RecipeError, match="no recipe is called"):
            named_recipe(name)


def test_places_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, tmp_path / "absent")
    with pytest.raises(RecipeError, match="FASTGEN_RECIPES names a directory that is not there"):
        list_recipes()
    (tmp_path / "file.yaml").write_text("name: x\n")
    environment(monkeypatch, tmp_path / "file.yaml")
    with pytest.raises(RecipeError, match=r"file\.yaml: is a file; FASTGEN_RECIPES takes directories$"):
        list_recipes()
    (tmp_path / "file.yaml").unlink()
    environment(monkeypatch, tmp_path, tmp_path)  # once is enough
    variant(tmp_path, "mine", "NewForCausalLM")
    assert find_recipe(NEW).name == "mine"
    monkeypatch.setenv(search_path.ENVIRONMENT_VARIABLE, "")
    for target, message in [
        (ImportError("no such module"), "entry point 'broken' of fastgen.recipes fails: .*no such module"),
        (3, "entry point 'broken' of fastgen.recipes fails"),
        (str(tmp_path / "absent"), "names no directory"),
    ]:
        entry_points(monkeypatch, broken=target)
        with pytest.raises(RecipeError, match=message):
            list_recipes()


def test_a_broken_recipe_in_a_place_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.yaml").write_text("name: broken\nmodle: {}\n")
    environment(monkeypatch, tmp_path)
    with pytest.raises(RecipeError, match="modle") as caught:
        find_recipe(LLAMA)
    assert caught.value.file == str(tmp_path / "broken.yaml")


def test_a_package_is_found_as_soon_as_it_is_installed_and_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, recipes = tmp_path / "site", tmp_path / "recipes"
    variant(recipes, "mine", "NewForCausalLM")
    site.mkdir()
    (site / "its_module.py").write_text(f"recipes = {str(recipes)!r}\n")
    monkeypatch.syspath_prepend(site)
    with pytest.raises(UnknownArchitectureError):
        find_recipe(NEW)
    installed = site / "mine-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[others]\na = nothing\n[fastgen.recipes]\na = its_module:recipes\n")
    assert find_recipe(NEW).name == "mine"
    shutil.rmtree(installed)
    with pytest.raises(UnknownArchitectureError):
        find_recipe(NEW)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_depends_on_a_recipes_name(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in recipes under one another's names and files give the same models."""
    config = {
        **{"hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128},
        **{"num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
        **{"vocab_size": 100},
    }
    names = sorted(file.stem for file in RECIPES.glob("*.yaml"))
    shuffled = names[:]
    random.Random(seed).shuffle(shuffled)
    new_name = dict(zip(names, shuffled, strict=True))
    files = names[:]
    random.Random(seed + 100).shuffle(files)
    for name, file in zip(names, files, strict=True):
        text = (RECIPES / f"{name}.yaml").read_text()
        text = re.sub(r"^(name|extends): (\w+)", lambda match: f"{match[1]}: {new_name[match[2]]}", text, flags=re.M)
        (tmp_path / f"{file}.yaml").write_text(text)
    for architecture, kind in [("LlamaForCausalLM", "llama"), ("MistralForCausalLM", "mistral")]:
        config["architectures"] = [architecture]
        monkeypatch.delenv(search_path.ENVIRONMENT_VARIABLE, raising=False)
        expected = resolve(find_recipe(config), config)
        environment(monkeypatch, tmp_path)
        recipe = find_recipe(config)
        assert isinstance(recipe, Recipe)
        assert recipe.name == new_name[kind], f"seed {seed}"
        found = resolve(recipe, config)
        assert [(each.names, each.shape) for each in found.tensors()] == [
            (each.names, each.shape) for each in expected.tensors()
        ], f"seed {seed}"
        assert [part.sliding_window for part in found.attentions()] == [
            part.sliding_window for part in expected.attentions()
        ]
