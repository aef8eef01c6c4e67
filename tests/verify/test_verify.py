"""verify accepts the shipped recipes, rejects hand-made mistakes at the right node, and names tested causes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.verify import verify
from tests.draws import number
from tests.fast import cases

CONFIGS = number(20, in_short=8)
RECIPES = Path(__file__).parents[2] / "recipes"
ATTEND = "model.layers.residual.attend"
TRANSFORM = "model.layers.residual.transform"


@pytest.mark.parametrize("name", cases(["llama", "mistral", "opt"], fast=["llama"]))
def test_shipped_recipes_pass(name: str) -> None:
    report = verify(name, configs=4)
    assert report.passed, report.finding
    counts = {check: result.num_compared for check, result in report.checks.items()}
    assert counts["nodes"] > 100
    assert counts["log-probabilities"] == 4
    assert counts.keys() == {"numbers", "weights", "nodes", "log-probabilities", "alone", "whole", "chunked", "kernels"}


def test_a_model_is_tested_with_its_own_recipe_and_flags() -> None:
    report = verify("tiny-opt", configs=2)
    assert report.passed, report.finding
    assert report.recipe == "opt"
    assert all(config["do_layer_norm_before"] for config in report.configs if "do_layer_norm_before" in config)


def mutated(tmp_path: Path, name: str, old: str, new: str, count: int = 1) -> Recipe:
    """Returns the shipped recipe with a piece of its text replaced ``count`` times."""
    text = (RECIPES / f"{name}.yaml").read_text()
    assert text.count(old) >= count, f"{old!r} stands {text.count(old)} times in {name}.yaml"
    file = tmp_path / f"{name}.yaml"
    file.write_text(text.replace(old, new, count))
    return load_recipe(file)


MUTANTS = [
    # recipe, old text, new text, expected node, expected text of the cause
    ("llama", "theta: rope.rope_theta", "theta: 10 * rope.rope_theta", f"{ATTEND}.attention.rotary.theta", "theta"),
    ("llama", "weight: input_layernorm, eps: eps", "weight: input_layernorm, eps: 1e-4", f"{ATTEND}.norm.eps",
     "0.0001 -> eps"),
    ("opt", "bias: true,\n           eps: 1e-5, when: do_layer_norm_before", "bias: true,\n           eps: 1e-6, "
     "when: do_layer_norm_before", f"{ATTEND}.norm.eps", "1e-06 -> 1e-05"),
    ("llama", "output: {weight: self_attn.o_proj, bias: attention_bias | default(false)}",
     "output: {weight: self_attn.o_proj, bias: false}", f"{ATTEND}.attention.output.bias", "attention_bias"),
    ("opt", "v: self_attn.v_proj, bias: enable_bias | default(true)", "v: self_attn.v_proj, bias: false",
     f"{ATTEND}.attention.qkv.bias", "bias"),
    ("llama", "q: self_attn.q_proj, k: self_attn.k_proj", "q: self_attn.k_proj, k: self_attn.q_proj",
     f"{ATTEND}.attention.qkv.q", "are swapped"),
    ("llama", "gate: mlp.gate_proj\n          up: mlp.up_proj", "gate: mlp.up_proj\n          up: mlp.gate_proj",
     f"{TRANSFORM}.mlp.gate", "are swapped"),
    ("llama", "norm: {kind: rms, weight: input_layernorm", "norm: {kind: layer, weight: input_layernorm",
     f"{ATTEND}.norm.kind", "layer -> rms"),
    ("mistral", "sliding_window: sliding_window | default(4096)", 
     "sliding_window: (sliding_window | otherwise(99)) + 1", f"{ATTEND}.attention.sliding_window", "sliding_window"),
    ("mistral", "default(4096)", "default(2048)", f"{ATTEND}.attention.sliding_window", None),
    ("llama", "output: {weight", "scale: 0.2\n          output: {weight", f"{ATTEND}.attention.scale", "scale"),
    ("opt", "offset: 2, rows: max_positions + 2", "offset: 1, rows: max_positions + 2",
     "model.embedding.positions.offset", "1 -> 2"),
    ("llama", "tied: tie_word_embeddings | default(false)", "tied: false", "model.head.tied", "tie_word_embeddings"),
    ("llama", "tied: tie_word_embeddings | default(false)", "tied: tie_word_embeddings | default(true)",
     "model.head.tied", None),
    ("llama", "activation: hidden_act | default('silu')", "activation: \"'relu'\"", f"{TRANSFORM}.mlp.activation",
     "hidden_act"),
    ("llama", "norm: {kind: rms, weight: post_attention_layernorm", "sum_norm: {kind: rms, weight: "
     "post_attention_layernorm", f"{TRANSFORM}.sum_norm", "should be norm"),
    ("llama", "default(rope_theta | default(10000))", "default(rope_theta | default(10001))",
     f"{ATTEND}.attention.rotary.theta", None),
    ("gpt2", "transformer.h: [h], ", "", "aliases", None),
    ("gpt_neox", ', "*.rotary_emb.inv_freq"]', "]", "ignores.tensors", None),
    ("gpt_neox", "use_parallel_residual | default(true)", "use_parallel_residual | default(false)", "define.parallel",
     "default(true)"),
    ("cohere", "  biases:  attention_bias | default(false)\n", "", "define.biases", None),
    ("bloom", "  - not (apply_residual_connection_post_layernorm | default(false))\n", "", "requires", None),
    ("opt", "when: not (do_layer_norm_before | default(true))}\n      transform", "when: (do_layer_norm_before | "
     "default(true))}\n      transform", f"{ATTEND}.sum_norm.when", "not ("),
]  # fmt: skip


# Others are like them, but for the key.
SELDOM = {
    *("default(rope_theta | default(10000))", "tied: tie_word_embeddings | default(false)", "default(4096)"),
    *("q: self_attn.q_proj, k: self_attn.k_proj", "v: self_attn.v_proj, bias: enable_bias | default(true)"),
    *("weight: input_layernorm, eps: eps", "activation: hidden_act | default('silu')", "output: {weight"),
    *("norm: {kind: rms, weight: post_attention_layernorm", "offset: 2, rows: max_positions + 2"),
    "use_parallel_residual | default(true)",
    "  - not (apply_residual_connection_post_layernorm | default(false))\n",
}


@pytest.mark.parametrize(
    ("name", "old", "new", "node", "cause"),
    [
        pytest.param(*each, id=f"{each[0]} {each[3]}", marks=pytest.mark.slow if each[1] in SELDOM else ())
        for each in MUTANTS
    ],
)
def test_mistakes_are_found_at_their_node(
    tmp_path: Path, name: str, old: str, new: str, node: str, cause: str | None
) -> None:
    recipe = mutated(tmp_path, name, old, new)
    report = verify(recipe, configs=CONFIGS)
    finding = report.finding
    assert finding is not None, f"not noticed: {old} -> {new}"
    assert finding.node is not None
    assert finding.node.path == node or (cause is None and node.startswith(finding.node.path)), finding
    lines = Path(finding.node.file).read_text().splitlines()
    assert finding.node.path.rpartition(".")[2] in lines[finding.node.line - 1], finding.node
    if cause is not None:
        assert finding.cause is not None, finding
        assert cause in finding.cause.change
        assert finding.cause.complete


def test_a_default_that_several_nodes_repeat_is_changed_in_all_of_them(tmp_path: Path) -> None:
    recipe = mutated(tmp_path, "llama", "attention_bias | default(false)", "attention_bias | default(true)", 2)
    finding = verify(recipe, configs=CONFIGS).finding
    assert finding is not None
    assert finding.cause is not None, finding
    assert finding.cause.change == "bias attention_bias | default(true) -> attention_bias | default(false), in 2 nodes"


def test_a_number_that_is_right_for_one_file_alone_is_no_cause(tmp_path: Path) -> None:
    recipe = mutated(
        tmp_path, "llama", "rope.rope_theta | default(rope_theta | default(10000))", "first('rope_theta', 10000)"
    )
    finding = verify(recipe, configs=CONFIGS).finding
    assert finding is not None
    assert finding.cause is None or " -> first(" in finding.cause.change, finding.cause
