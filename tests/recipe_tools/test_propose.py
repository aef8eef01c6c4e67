"""Proposals for structures that no shipped recipe has, and for headers that make no sense."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.errors import CheckpointError, RecipeError
from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.models.registry.registry import list_recipes
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import AttentionSpec, MoeSpec
from fastgen.recipe_tools.propose.propose import Proposal, propose

Shapes = dict[str, tuple[int, ...]]
CONFIG: dict[str, Any] = {
    "architectures": ["HeronForCausalLM"],
    "model_type": "heron",
    "vocab_size": 101,
    "d_model": 48,
    "depth": 2,
    "n_heads": 6,
    "n_kv_heads": 2,
    "d_ff": 80,
    "norm_eps": 1e-6,
    "act_fn": "silu",
    "context_length": 128,
    "rope_base": 10000.0,
}


@pytest.fixture(scope="module")
def recipes() -> list[Recipe]:
    return [each.recipe for each in list_recipes()]


def heron(layer: Mapping[str, tuple[int, ...]], **top: tuple[int, ...]) -> Shapes:
    """Returns the shapes of two layers of these tensors below ``trunk.blocks``."""
    shapes: Shapes = {"trunk.tok.weight": (101, 48), "trunk.out_norm.weight": (48,), "unembed.weight": (101, 48)}
    shapes |= {f"trunk.{name}": shape for name, shape in top.items()}
    return shapes | {f"trunk.blocks.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}


ATTENTION: Shapes = {
    "mixer.query.weight": (48, 48),
    "mixer.key.weight": (16, 48),
    "mixer.value.weight": (16, 48),
    "mixer.out.weight": (48, 48),
}
GATED: Shapes = {"ff.gate.weight": (80, 48), "ff.up.weight": (80, 48), "ff.down.weight": (48, 80)}
NORMS: Shapes = {"pre_mixer.weight": (48,), "pre_ff.weight": (48,)}


def whole(proposal: Proposal) -> Proposal:
    assert not proposal.unclaimed
    assert not proposal.missing
    return proposal


def attention_of(proposal: Proposal) -> AttentionSpec:
    part = next(iter(proposal.spec.attentions()))
    assert isinstance(part, AttentionSpec)
    return part


def test_roles_are_found_by_words_and_shapes(recipes: list[Recipe]) -> None:
    spec = whole(propose(CONFIG, heron(ATTENTION | GATED | NORMS), recipes)).spec
    assert (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (48, 6, 2, 8)
    names = {each.weight.names[0] for part in spec.attentions() for each in (part.q,)}  # type: ignore[union-attr]
    assert names == {"trunk.blocks.0.mixer.query.weight", "trunk.blocks.1.mixer.query.weight"}
    assert [branch.name for branch in spec.layers[0].branches] == ["attend", "transform"]


def test_qk_norm_and_biases_of_a_parallel_layer(recipes: list[Recipe]) -> None:
    layer = ATTENTION | {name.replace("weight", "bias"): shape[:1] for name, shape in ATTENTION.items()}
    layer |= {"mixer.q_norm.weight": (8,), "mixer.k_norm.weight": (8,), "norm.weight": (48,), "norm.bias": (48,)}
    layer |= {"ff.fc1.weight": (80, 48), "ff.fc2.weight": (48, 80)}
    spec = whole(propose(CONFIG | {"act_fn": "relu"}, heron(layer), recipes)).spec
    (branch,) = spec.layers[0].branches
    assert len(branch.parts) == 2
    assert branch.norm is not None
    assert branch.norm.kind == "layer"
    attention = branch.parts[0].part
    assert isinstance(attention, AttentionSpec)
    assert attention.q_norm is not None
    assert attention.q_norm.over == "head"
    assert attention.q.bias is not None


def test_a_fused_projection_asks_for_its_layout(recipes: list[Recipe]) -> None:
    layer = {"mixer.qkv.weight": (80, 48), "mixer.out.weight": (48, 48)} | GATED | NORMS
    proposal = whole(propose(CONFIG, heron(layer), recipes))
    assert attention_of(proposal).num_kv_heads == 2
    asked = [each for each in proposal.questions if each.path.endswith("qkv.layout")]
    assert len(asked) == 1
    assert "layout:" in proposal.text.splitlines()[asked[0].line - 1]


def test_experts_their_router_and_a_dense_first_layer(recipes: list[Recipe]) -> None:
    shapes = heron(ATTENTION | NORMS)
    shapes |= {f"trunk.blocks.0.{name}": shape for name, shape in GATED.items()}
    for expert in range(4):
        for name, shape in (("gate", (24, 48)), ("up", (24, 48)), ("down", (48, 24))):
            shapes[f"trunk.blocks.1.ff.experts.{expert}.{name}.weight"] = shape
    shapes["trunk.blocks.1.ff.router.weight"] = (4, 48)
    config = CONFIG | {"expert_size": 24, "n_experts": 4, "experts_per_token": 2}
    spec = whole(propose(config, shapes, recipes)).spec
    kinds = [type(layer.branches[1].parts[0].part).__name__ for layer in spec.layers]
    assert kinds == ["MlpSpec", "MoeSpec"]
    mixture = spec.layers[1].branches[1].parts[0].part
    assert isinstance(mixture, MoeSpec)
    assert (len(mixture.experts), mixture.experts[0].up.out_features) == (4, 24)


def test_tensors_without_a_role_are_listed_as_a_question(recipes: list[Recipe]) -> None:
    shapes = heron(ATTENTION | GATED | NORMS) | {"vision.patch.weight": (48, 3, 4, 4), "vision.proj.weight": (9, 48)}
    proposal = propose(CONFIG, shapes, recipes)
    assert set(proposal.unclaimed) == {"vision.patch.weight", "vision.proj.weight"}
    assert "# - vision.patch.weight" in proposal.text
    assert any("not claimed by any node" in each.text for each in proposal.questions)


def test_an_unread_key_becomes_a_question_and_is_not_ignored(recipes: list[Recipe], tmp_path: Path) -> None:
    config = CONFIG | {"warp_factor": 3, "warp": {"kind": "cold"}, "attention_dropout": 0.1, "pruned_heads": {}}
    proposal = whole(propose(config, heron(ATTENTION | GATED | NORMS), recipes))
    assert proposal.unread == ("warp_factor", "warp")
    asked = next(each for each in proposal.questions if each.path == "ignores.config")
    assert "warp_factor = 3" in asked.text
    with pytest.raises(RecipeError, match=r"does not account(.|\n)*warp_factor(.|\n)*warp"):
        resolve(proposal.recipe, config)
    assert resolve(proposal.recipe, config, allow_config_keys=proposal.unread) == proposal.spec

    # the answer is that both change nothing: remove the comment marks of the suggested lines
    lines = proposal.text.splitlines()
    number = asked.line - 1
    assert lines[number - 1] == "# ignores:"
    lines[number - 1 : number + 1] = [line.removeprefix("# ") for line in lines[number - 1 : number + 1]]
    file = tmp_path / "heron.yaml"
    file.write_text("\n".join(lines))
    answered = load_recipe(file, find=lambda name, _: next(each.file for each in recipes if each.name == name))
    assert answered.schema.ignores.config == ("warp_factor", "warp")
    resolve(answered, config)


def test_the_suggestion_keeps_what_is_ignored_beside_it(recipes: list[Recipe]) -> None:
    shapes = heron(ATTENTION | GATED | NORMS) | {"trunk.blocks.0.mixer.inv_freq": (4,)}
    proposal = whole(propose(CONFIG | {"warp_factor": 3}, shapes, recipes))
    assert "*.inv_freq" in proposal.recipe.schema.ignores.tensors
    assert "warp_factor" not in proposal.recipe.schema.ignores.config
    assert re.search(r"^ignores:\n  # config: \[.*warp_factor\]   # QUESTION", proposal.text, re.MULTILINE)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({}, "no tensors"),
        ({"a.weight": (3, 4), "b.weight": (5,)}, "numbered by layer"),
        ({"layers.0.conv.weight": (3, 4, 5), "embed.weight": (101, 48)}, r"conv\.weight \[3, 4, 5\].* a convolution"),
        ({"layers.0.norm.weight": (48,), "embed.weight": (101, 48)}, "fit an attention over 48 features"),
    ],
)
def test_tensors_that_are_not_a_decoder_are_an_error(shapes: Shapes, said: str, recipes: list[Recipe]) -> None:
    with pytest.raises(CheckpointError, match=said):
        propose(CONFIG, shapes, recipes)


WORDS = (
    "q",
    "k",
    "v",
    "o",
    "gate",
    "up",
    "down",
    "norm",
    "router",
    "experts.0",
    "experts.1",
    "qkv",
    "ümlaut",
    "a b",
    "",
)
SIZES = st.sampled_from((0, 1, 2, 3, 8, 16, 48, 80, 101, 144))
NAMES = st.lists(st.sampled_from((*WORDS, "layers.0", "layers.1", "mlp", "attn")), min_size=1, max_size=4).map(".".join)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(0, 1e9), st.text(max_size=8), st.just([1])
)


@settings(max_examples=40, deadline=None)
@given(
    odd=st.dictionaries(NAMES.map(lambda name: f"{name}.weight"), st.lists(SIZES, max_size=3).map(tuple), max_size=12),
    dropped=st.sets(st.sampled_from(sorted(ATTENTION | GATED | NORMS)), max_size=3),
    keys=st.dictionaries(
        st.sampled_from((*CONFIG, "sliding_window", "rope_scaling", "x y", "layer")), VALUES, max_size=4
    ),
)
def test_any_headers_make_a_recipe_or_a_clear_error(
    odd: Shapes, dropped: set[str], keys: dict[str, Any], recipes: list[Recipe]
) -> None:
    layer = {name: shape for name, shape in (ATTENTION | GATED | NORMS).items() if name not in dropped}
    shapes = odd | heron(layer)
    try:
        proposal = propose(CONFIG | keys, shapes, recipes)
    except CheckpointError:
        return
    claimed = [name for each in proposal.spec.tensors() for name in each.names if each.layout is None]
    assert len(claimed) == len(set(claimed))
    assert set(proposal.unclaimed) <= set(shapes)
