"""The explanation of a recipe is complete, and with a configuration has nothing superfluous."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import AttentionSpec, LatentAttentionSpec, LayerSpec, MlpSpec, MoeSpec
from fastgen.recipe_tools.explain.explain import Explanation, explain
from fastgen.verify.edits import replaced
from tests.recipe_tools.published import CONFIGS

RECIPES = {
    file.stem: load_recipe(file) for file in sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
}
KINDS = {AttentionSpec: "attention", LatentAttentionSpec: "latent_attention", MlpSpec: "mlp", MoeSpec: "moe"}
BRANCHES = ("model", "layers", "residual")


def test_there_is_a_configuration_for_every_recipe() -> None:
    assert CONFIGS.keys() == RECIPES.keys()


def texts_of(explanation: Explanation) -> list[str]:
    return [fact.text for box in explanation.boxes() for fact in box.facts]


def words_of(explanation: Explanation) -> set[str]:
    return {word for text in texts_of(explanation) for word in re.findall(r"[\w.{}\-]+", text)}


def module_of(tensor: str, recipe: Recipe) -> str:
    """Returns a tensor's name as the recipe writes it: without suffix and without the prefix of layer and expert."""
    at = re.escape(recipe.schema.model.layers.at).replace(r"\{layer\}", r"\d+")
    name = re.sub(rf"^{at}\.", "", tensor)
    for branch in recipe.schema.model.layers.residual.values():
        if branch.moe:
            name = re.sub(rf"^{re.escape(branch.moe.experts.at)}\.".replace(r"\{expert\}", r"\d+"), "", name)
    return name


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_the_model_is_named(name: str) -> None:
    recipe_name, config = CONFIGS[name]
    recipe = RECIPES[recipe_name]
    spec = resolve(recipe, config)
    for explanation in (explain(recipe), explain(recipe, config)):
        words = words_of(explanation)
        for tensor in spec.tensors():
            module = module_of(tensor.names[0], recipe)
            assert module in words or module.rpartition(".")[0] in words, tensor.names[0]
        if any(spec.tensors()):
            assert any(recipe.schema.model.layers.at in kind.title for kind in explanation.layers)


@pytest.mark.parametrize("name", CONFIGS)
def test_with_a_configuration_exactly_the_present_nodes_are_drawn(name: str) -> None:
    recipe_name, config = CONFIGS[name]
    spec = resolve(RECIPES[recipe_name], config)
    explanation = explain(RECIPES[recipe_name], config)
    assert not any(
        fact.label == "only if" or "only if" in fact.text for box in explanation.boxes() for fact in box.facts
    )
    drawn = {index: kind for kind in explanation.layers for index in kind.indices or ()}
    assert sorted(drawn) == list(range(spec.num_layers))
    assert sum(len(kind.indices or ()) for kind in explanation.layers) == spec.num_layers
    for layer in spec.layers:
        branches = drawn[layer.index].branches
        assert [box.node for branch in branches for box in branch.boxes()] == expected_nodes(layer)
        assert all(branch.condition is None for branch in branches)
        assert all(len(lane.alternatives) == 1 for branch in branches for lane in branch.lanes)
        for attention in (each.part for branch in layer.branches for each in branch.parts):
            if isinstance(attention, AttentionSpec):
                (box,) = (box for branch in branches for box in branch.boxes() if box.node == attention.node.path)
                check_attention(attention, {fact.label: fact.text for fact in box.facts})
    assert (explanation.ending[0].node == "model.final_norm") == (spec.final_norm is not None)
    assert any(box.added for box in explanation.embedding) == (spec.embedding.positions is not None)
    tied = "that of the token embedding (tied)"
    assert (explanation.ending[-1].facts[0].text == tied) == spec.tied


def expected_nodes(layer: LayerSpec) -> list[str]:
    nodes = []
    for branch in layer.branches:
        nodes += [branch.norm.node.path] if branch.norm else []
        for each in branch.parts:
            nodes += [each.norm.node.path] if each.norm else []
            nodes.append(each.part.node.path)
            assert each.part.node.path.endswith(f".{KINDS[type(each.part)]}")
        nodes += [branch.output_norm.node.path] if branch.output_norm else []
        nodes += [f"{branch.node.path}.scale"] if branch.scale != 1 else []
        nodes += [branch.sum_norm.node.path] if branch.sum_norm else []
    return nodes


def check_attention(attention: AttentionSpec, facts: dict[str, str]) -> None:
    assert ("rotary" in facts) == (attention.rotary is not None)
    assert ("ALiBi" in facts) == (attention.alibi is not None)
    assert ("softcap" in facts) == (attention.softcap is not None)
    assert ("q norm" in facts) == (attention.q_norm is not None)
    assert ("bias" in facts) == (attention.q.bias is not None)
    assert ("bias" in facts["output"]) == (attention.output.bias is not None)
    window = attention.sliding_window
    assert facts["sees"] == ("every token up to itself" if window is None else f"a window of tokens: {window:,}")
    assert facts["heads"].startswith(f"{attention.num_heads:,}, ")
    assert facts["heads"].endswith(f"; {attention.head_dim} features each")
    assert (
        f"sharing {attention.num_kv_heads} KV head" in facts["heads"] or attention.num_heads == attention.num_kv_heads
    )
    if attention.rotary is not None:
        assert float(facts["θ"].replace(",", "")) == pytest.approx(attention.rotary.theta)
        assert ("stretch" in facts) == (attention.rotary.scaling is not None)
        assert ("2i with 2i + 1" in facts["rotary"]) == (attention.rotary.kind == "interleaved")
        assert ("rotated" in facts) == (attention.rotary.dim != attention.head_dim)


def test_without_a_configuration_conditions_are_written_on_the_boxes() -> None:
    facts = {(box.node, fact.label): fact.text for box in explain(RECIPES["opt"]).boxes() for fact in box.facts}
    assert facts["model.layers.residual.attend.norm", "only if"] == "do_layer_norm_before | default(true)"
    assert facts["model.layers.residual.attend.sum_norm", "only if"] == "not (do_layer_norm_before | default(true))"
    falcon = explain(RECIPES["falcon"])
    assert [branch.condition for branch in falcon.layers[0].branches] == ["parallel", "not parallel", "not parallel"]
    assert "; only if not alibi" in "".join(texts_of(falcon))
    (transform,) = (
        branch for branch in explain(RECIPES["deepseek_v3"]).layers[0].branches if branch.name == "transform"
    )
    (lane,) = transform.lanes
    assert [boxes[-1].title for boxes in lane.alternatives] == ["gated feed-forward", "mixture of experts"]
    assert [boxes[-1].facts[-1].text for boxes in lane.alternatives] == ["layer < dense", "layer >= dense"]


def test_layers_that_are_alike_are_drawn_once() -> None:
    deepseek = explain(RECIPES["deepseek_v3"], CONFIGS["deepseek_v3"][1])
    assert [kind.title.split(",")[0] for kind in deepseek.layers] == ["layers 0–2 of 8", "layers 3–7 of 8"]
    gemma2 = explain(RECIPES["gemma2"], CONFIGS["gemma2"][1])
    count = CONFIGS["gemma2"][1]["num_hidden_layers"]
    first = f"layers 0, 2, 4 … {count - 2} of {count}, at model.layers.{{layer}}"
    assert [kind.title for kind in gemma2.layers] == [
        first,
        first.replace("0, 2, 4", "1, 3, 5").replace(f"{count - 2} of", f"{count - 1} of"),
    ]
    assert any("2 kinds of layers" in sentence for sentence in gemma2.sentences)
    assert [kind.title.split(",")[0] for kind in explain(RECIPES["llama"], CONFIGS["llama"][1]).layers] == [
        f"layers 0–{CONFIGS['llama'][1]['num_hidden_layers'] - 1} of {CONFIGS['llama'][1]['num_hidden_layers']}"
    ]


def test_numbers_that_differ_in_every_layer_are_a_range() -> None:
    config = CONFIGS["gpt2"][1] | {"scale_attn_by_inverse_layer_idx": True, "n_layer": 12}
    (kind,) = explain(RECIPES["gpt2"], config).layers
    (scores,) = (
        fact.text for branch in kind.branches for box in branch.boxes() for fact in box.facts if fact.label == "scores"
    )
    head_dim = config["n_embd"] // config["n_head"]
    ends = f"{head_dim**-0.5:.6g} … {head_dim**-0.5 / 12:.6g}"
    assert scores == f"q·k × ({ends}, by layer: 1 / (root * (layer + 1)) if inverse else 1 / root)"


def test_the_name_of_a_recipe_changes_nothing_but_itself() -> None:
    for recipe in RECIPES.values():
        renamed = replaced(recipe, {("name",): "another"})
        assert renamed is not None
        assert dataclasses.replace(explain(renamed), recipe=recipe.name) == explain(recipe)


@pytest.mark.parametrize(
    ("path", "value", "label", "text"),
    [
        (("attend", "attention", "softcap"), 50, "softcap", "scores s become c·tanh(s / c), c = 50"),
        (
            ("attend", "attention", "sliding_window"),
            "none if layer % 4 == 3 else 1024",
            "sees",
            "a window of tokens: none if layer % 4 == 3 else 1024",
        ),
        (
            ("attend", "attention", "rotary", "kind"),
            "interleaved",
            "rotary",
            "rotates features by position, 2i with 2i + 1",
        ),
        (("attend", "attention", "rotary", "fraction"), 0.25, "rotated", "this part of each head: 0.25"),
        (("attend", "attention", "scale"), "1 / 7", "scores", "q·k × 0.142857"),
        (("attend", "norm", "offset"), 1, "weight", "input_layernorm, with 1 added to it"),
        (("attend", "norm", "bias"), "b", "weight", "input_layernorm, and a bias if b"),
        (("attend", "scale"), 0.22, "times", "0.22"),
        (("transform", "mlp", "bias"), True, "bias", "yes"),
    ],
)
def test_a_change_of_the_recipe_is_explained(path: tuple[str, ...], value: Any, label: str, text: str) -> None:
    changed = replaced(RECIPES["llama"], {(*BRANCHES, *path): value})
    assert changed is not None
    before = {(box.node, fact.label): fact.text for box in explain(RECIPES["llama"]).boxes() for fact in box.facts}
    after = {(box.node, fact.label): fact.text for box in explain(changed).boxes() for fact in box.facts}
    different = {key: after[key] for key in after if after[key] != before.get(key)}
    assert [(key[1], said) for key, said in different.items()] == [(label, text)]


def test_sentences() -> None:
    assert explain(RECIPES["gpt_neox"]).sentences[1:3] == (
        "The model gets the position of a token from queries and keys that are rotated by position (rotary).",
        "both (only if parallel): the attention and the plain feed-forward run in parallel; each reads the stream "
        "through a norm of its own; their outputs are added to the stream.",
    )
    assert explain(RECIPES["bloom"]).sentences[1].endswith("from scores that fall with distance (ALiBi).")
    assert "learned vector" in explain(RECIPES["gpt2"]).sentences[1]
    assert "its output is normalized and added" in explain(RECIPES["gemma2"]).sentences[2]
    assert "scaled and added" in explain(RECIPES["granite"]).sentences[2]
    assert "and the sum is normalized" in explain(RECIPES["opt"]).sentences[2]


def test_the_legend_says_what_every_number_is() -> None:
    for name, (recipe_name, config) in CONFIGS.items():
        recipe = RECIPES[recipe_name]
        numbers, *others = explain(recipe, config).legend
        assert [fact.label for fact in numbers.facts] == [
            *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions")
        ], name
        spec = resolve(recipe, config)
        for fact in numbers.facts[:-1]:
            assert f": {getattr(spec, fact.label):,} = " in fact.text
        assert [fact.label for box in others for fact in box.facts if box.node == "define"] == [*recipe.schema.define]


def test_json_holds_all_of_it() -> None:
    explanation = explain(RECIPES["cohere"], CONFIGS["cohere"][1])
    whole = json.loads(json.dumps(explanation.as_json()))
    assert whole["recipe"] == "cohere"
    assert whole["layers"][0]["branches"][0]["lanes"][1]["alternatives"][0][0]["title"] == "gated feed-forward"
    assert whole["layers"][0]["indices"] == list(range(CONFIGS["cohere"][1]["num_hidden_layers"]))
