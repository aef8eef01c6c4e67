"""Nothing depends on the names of recipes and architectures: the proofs hold with all names shuffled."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers

import fastgen
from fastgen.models.registry.registry import find_recipe, list_recipes, named_recipe
from fastgen.models.resolve import resolve as resolving
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import ModelSpec
from fastgen.verify import verify
from tests.draws import number
from tests.matrix import Record
from tests.models import test_parity_more as families
from tests.models import test_recipe_published, test_recipe_published_families
from tests.recipe_tools.published import recipe_name
from tests.reference import check_family, save
from tests.shuffled import (
    Shuffled,
    model_types,
    ship,
    shipped_architectures,
    shipped_texts,
    shuffle,
    without_names,
)

PUBLISHED = test_recipe_published.PUBLISHED | test_recipe_published_families.PUBLISHED
SEED = 5


@pytest.fixture
def shuffled(tmp_path: Path) -> Shuffled:
    (tmp_path / "recipes").mkdir()
    return shuffle(tmp_path / "recipes", SEED)


def plain_family(prefix: str, **more: Any) -> Callable[[Random], tuple[Any, Any, str]]:
    """Returns a draw of one small configuration of a family that has its own parity test."""

    def draw(rng: Random) -> tuple[Any, Any, str]:
        drawn = families.sizes(rng, grouped=prefix != "OPT") | more
        if prefix == "OPT":
            drawn["ffn_dim"] = drawn.pop("intermediate_size")
        return getattr(transformers, f"{prefix}Config")(**drawn), getattr(transformers, f"{prefix}ForCausalLM"), "eager"

    return draw


FAMILIES: dict[str, Callable[[Random], tuple[Any, Any, str]]] = {
    **{name: (lambda rng, name=name: families.drawn_config(name, rng)) for name in families.DRAWS},
    "llama": plain_family("Llama", attention_bias=True),
    "mistral": plain_family("Mistral", sliding_window=7),
    "opt": plain_family("OPT", word_embed_proj_dim=12, do_layer_norm_before=False, pad_token_id=1),
    "internlm2": lambda rng: (families.drawn_internlm2(rng), transformers.LlamaForCausalLM, "eager"),
}


def recipe_of(family: str) -> str:
    return "falcon" if family.startswith("falcon") else family


def parity_under_new_names(family: str, shuffled: Shuffled) -> float:
    """Returns the largest difference from transformers of a drawn checkpoint of ``family`` under the new names."""
    write = families.save_as_internlm2 if family == "internlm2" else save

    def write_renamed(model: Any, directory: Path) -> None:
        write(model, directory)
        shuffled.rename_checkpoint(directory)

    rng = Random(f"{family} {SEED}")
    config, model_class, attention = FAMILIES[family](rng)
    options = families.drawn_options(rng)
    return check_family(config, model_class, options, SEED, attention=attention, write=write_renamed)


# The others resolve to the same models under both names, and no source file knows a name: both are tested below.
QUICK = {"llama", "gemma2", "gpt2", "falcon_40b", "deepseek_v3", "internlm2"}


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in FAMILIES]
)
def test_answers_are_transformers_under_any_name(
    family: str, shuffled: Shuffled, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    ship(shuffled, monkeypatch)
    assert shuffled.recipes[recipe_of(family)] in {each.recipe.name for each in list_recipes()}
    record(recipe_of(family), "shuffled", parity_under_new_names(family, shuffled))


def specs_agree(name: str, shuffled: Shuffled, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """Resolves a published configuration under both names and returns the spec under its own name."""
    config = PUBLISHED[name][0]
    own = resolve(find_recipe(config), config)
    with monkeypatch.context() as patch:
        ship(shuffled, patch)
        renamed = shuffled.config(config)
        found = resolve(find_recipe(renamed), renamed)
    assert found.recipe == shuffled.recipes[own.recipe]
    assert found.architecture == renamed["architectures"][0] != own.architecture
    assert shuffled.with_old_names(found) == without_names(own)
    return own


# Those that resolve quickly; mixtures with thousands of experts show nothing more than smaller ones.
SMALL_ENOUGH = [name for name, (_, count) in PUBLISHED.items() if count < 10**11]


# One of each recipe.
SMALLEST = {
    recipe_name(PUBLISHED[name][0]): name for name in sorted(SMALL_ENOUGH, key=lambda each: -PUBLISHED[each][1])
}


@pytest.mark.slow
def test_all_published_configurations_resolve_to_the_same_under_any_name(
    shuffled: Shuffled, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SMALL_ENOUGH:
        specs_agree(name, shuffled, monkeypatch)


@pytest.mark.slow
def test_published_configurations_resolve_to_the_same_under_any_name(
    shuffled: Shuffled, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {specs_agree(name, shuffled, monkeypatch).recipe for name in SMALLEST.values()}
    assert seen == shipped_texts().keys() - {"deepseek_v3"}  # which has only one size
    small = {"num_hidden_layers": 5, "n_routed_experts": 32}
    config, count = PUBLISHED["DeepSeek-V3"]
    monkeypatch.setitem(PUBLISHED, "DeepSeek-V3", (config | small, count))
    assert specs_agree("DeepSeek-V3", shuffled, monkeypatch).recipe == "deepseek_v3"


@pytest.mark.slow  # what needs names is looked for in the source, and found in answers
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
def test_verify_passes_under_any_name(name: str, shuffled: Shuffled, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of transformers is the reference, because the new name means another architecture there."""
    (architecture,) = named_recipe(name).architectures
    ship(shuffled, monkeypatch)
    report = verify(
        shuffled.recipes[name], reference=getattr(transformers, architecture), configs=number(2, in_short=1)
    )
    assert report.passed, report.finding
    assert report.recipe != name
    assert report.checks["nodes"].num_compared > 50


def test_no_name_is_kept(shuffled: Shuffled, monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (shuffled.recipes, shuffled.architectures, shuffled.model_types):
        assert names.keys() == set(names.values())
        assert all(old != new for old, new in names.items())
    assert len(shuffled.recipes) == len(shipped_texts()) >= 23
    ship(shuffled, monkeypatch)
    assert {each.recipe.file.parent for each in list_recipes()} == {shuffled.directory}


# ------------------------------------------------------------------------------------- a name that is used is noticed


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a forbidden dependency: Gemma's norms get their offset from the name of the recipe."""
    honest = resolving._Resolver.model

    def by_name(self: Any, *arguments: Any) -> ModelSpec:
        spec = honest(self, *arguments)
        assert spec.final_norm is not None
        offset = 1.0 if self.recipe.name in ("gemma", "gemma2") else 0.0
        return replace(spec, final_norm=replace(spec.final_norm, offset=offset))

    monkeypatch.setattr(resolving._Resolver, "model", by_name)


def test_a_planted_name_passes_unshuffled(plant: None) -> None:
    """This is why names are shuffled: no other test would notice."""
    rng = Random(f"gemma {SEED}")
    config, model_class, attention = families.drawn_config("gemma", rng)
    check_family(config, model_class, families.drawn_options(rng), SEED, attention=attention)
    assert resolve(named_recipe("llama"), PUBLISHED["Llama-2-7b"][0]).num_parameters == PUBLISHED["Llama-2-7b"][1]


@pytest.mark.parametrize("family", ["gemma", "the one called gemma now"])
def test_a_planted_name_is_seen_by_parity(
    family: str, plant: None, shuffled: Shuffled, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family not in FAMILIES:
        recipe = next(old for old, new in shuffled.recipes.items() if new == "gemma")
        family = next(each for each in FAMILIES if recipe_of(each) == recipe)
    ship(shuffled, monkeypatch)
    with pytest.raises(AssertionError, match="differs by"):
        parity_under_new_names(family, shuffled)


def test_a_planted_name_is_seen_by_the_specs(plant: None, shuffled: Shuffled, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        specs_agree("gemma-2b", shuffled, monkeypatch)
    specs_agree("phi-2", shuffled, monkeypatch)  # neither it nor the one it is named after depends on it


# ------------------------------------------------------------------------------------------- names in the source

LEGITIMATE = {
    ("models/resolve/config_keys.py", "is_llama_config"),  # a key of config.json
    ("cli/plan.py", "A config.json, a directory with one, a built-in, or a published name (llama-2-70b)."),
    ("cli/plan_options.py", "A question that was published: mistral-7b-24gb or falcon-40b-4x24gb."),
    ("models/checkpoint/kinds.py", "a model in GGUF, the format of llama.cpp, which fastgen does not read"),
    ("options.py", "A built-in such as tiny-llama, a local directory, or a hub id."),
}
NAMES_OF_FORMATS = "serving/tools/formats.py"  # formats of tool calls; the chat template selects one
# Measurements that others have published, of models with a name.
PUBLISHED_MEASUREMENTS = ("lab/paper/", "lab/plan/sheet.py", "cli/bench_paper.py")
KINDS_OF_SCALING = {"llama3"}  # the word in config.json for a kind of scaling


@cache
def names_of_families() -> re.Pattern[str]:
    names = {*shipped_texts(), *shipped_architectures(), *model_types()}
    whole = {re.sub(r"(ForCausalLM|LMHeadModel)$", "", name).lower() for name in names}
    stems = whole | {match[0] for name in whole if (match := re.match("[a-z]+", name))}  # qwen of qwen3_moe
    return re.compile(rf"(?<![a-z])(?:{'|'.join(map(re.escape, sorted(stems)))})(?![a-z])", re.I)


def families_named_in(source: str) -> Iterator[tuple[int, str]]:
    """Yields string constants, except docstrings, that contain the name of a shipped recipe, architecture or model
    type.
    """
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    named = names_of_families()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        if named.search(re.sub("ForCausalLM|LMHeadModel", "", node.value)) and node.value not in KINDS_OF_SCALING:
            yield node.lineno, node.value


def test_no_source_file_knows_a_name() -> None:
    package = Path(fastgen.__file__).parent
    found = {
        (str(file.relative_to(package)), text)
        for file in sorted(package.rglob("*.py"))
        if not str(file.relative_to(package)).startswith((NAMES_OF_FORMATS, *PUBLISHED_MEASUREMENTS))
        for _, text in families_named_in(file.read_text())
    }
    assert found == LEGITIMATE


@pytest.mark.parametrize(
    "source",
    [
        "if recipe.name == 'llama': pass",
        "match spec.recipe:\n    case 'gpt_neox': pass",
        "x = {'Qwen3ForCausalLM': 1}[spec.architecture]",
        "if 'falcon' in spec.architecture.lower(): pass",
        "y = name.startswith('Deepseek')",
        "z = config.model_type in ('phi', 'phi3')",
    ],
)
def test_a_name_in_a_source_is_seen(source: str) -> None:
    assert list(families_named_in(source))
