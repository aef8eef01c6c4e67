"""Recipes have the same fingerprint exactly if they compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastgen.models.fingerprint import fingerprint
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.registry.registry import named_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import Layout, MoeSpec
from fastgen.verify.edits import replaced

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
ATTEND = "model.layers.residual.attend"


def of(recipe: Recipe | None) -> bytes:
    assert recipe is not None
    return fingerprint(resolve(recipe, CONFIG))


def changed(path: str, value: object) -> Recipe | None:
    return replaced(named_recipe("llama"), {tuple(path.split(".")): value})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("path", "value"),
    [(f"{ATTEND}.norm.eps", 1e-5), ("config.num_kv_heads", "num_attention_heads"), ("define.unused", 3)],
)
def test_another_way_to_say_the_same(path: str, value: object) -> None:
    assert of(changed(path, value)) == of(named_recipe("llama"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{ATTEND}.norm.eps", 2e-5),
        (f"{ATTEND}.norm.weight", "input_norm"),
        (f"{ATTEND}.norm.kind", "layer"),
        (f"{ATTEND}.norm", None),
        (f"{ATTEND}.attention.rotary.theta", 10001),
        (f"{ATTEND}.attention.qkv.bias", True),
        ("model.head.tied", True),
    ],
)
def test_another_thing(path: str, value: object) -> None:
    assert of(changed(path, value)) != of(named_recipe("llama"))


def layout_of(pattern: str, sizes: dict[str, int], part: tuple[int, int] | None = None) -> bytes:
    spec = resolve(named_recipe("llama"), CONFIG)
    layout = Layout(pattern, tuple(sizes.items()), part)
    return fingerprint(
        replace(spec, embedding=replace(spec.embedding, tokens=replace(spec.embedding.tokens, layout=layout)))
    )


def test_layouts_are_alike_that_take_the_same_rows() -> None:
    sizes = {"part": 3, "num_heads": 2, "head_dim": 4, "in": 8}
    usual = layout_of("in (part num_heads head_dim)", sizes, (0, 1))
    assert layout_of("in (part head_dim num_heads)", sizes, (0, 1)) == usual
    assert layout_of("in (num_heads part head_dim)", sizes, (0, 1)) != usual
    assert layout_of("in (part num_heads head_dim)", sizes, (1, 2)) != usual
    assert layout_of("(part num_heads head_dim) in", sizes, (0, 1)) != usual
    one = sizes | {"num_heads": 1}
    assert layout_of("(num_heads part head_dim) in", one, (0, 1)) == layout_of("(part head_dim) in", one, (0, 1))


def test_a_plain_layout_is_none() -> None:
    assert layout_of("rows in", {"rows": 61, "in": 24}) == of(named_recipe("llama"))
    assert layout_of("in rows", {"rows": 61, "in": 24}) != of(named_recipe("llama"))


def router(**changes: Any) -> bytes:
    config = {**CONFIG, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    config |= {"num_experts_per_tok": 2, "num_key_value_heads": 3}
    spec = resolve(named_recipe("mixtral"), config)
    (layer, *rest), (branch, last) = spec.layers, spec.layers[0].branches
    (part,) = last.parts
    assert isinstance(part.part, MoeSpec)
    moe = replace(part.part, router=replace(part.part.router, **changes))
    last = replace(last, parts=(replace(part, part=moe),))
    return fingerprint(replace(spec, layers=(replace(layer, branches=(branch, last)), *rest)))


def test_softmax_of_the_chosen_is_what_normalizing_makes_of_softmax_of_all() -> None:
    usual = router(scoring="softmax", normalize=True)
    assert router(scoring="softmax_top_k", normalize=False) == router(scoring="softmax_top_k", normalize=True) == usual
    assert router(scoring="softmax", normalize=False) != usual
    assert router(scoring="softmax", normalize=True, num_groups=2) != usual


def test_the_norm_of_an_only_part_is_its_branchs() -> None:
    llama = named_recipe("llama")
    norm = llama.tree.find((*ATTEND.split("."), "norm"))
    at = tuple(ATTEND.split("."))
    assert of(replaced(llama, {(*at, "norm"): None, (*at, "attention", "norm"): norm})) == of(llama)
    mlp = llama.tree.find(("model", "layers", "residual", "transform", "mlp"))
    parallel = {(*at, "mlp"): mlp, ("model", "layers", "residual", "transform"): None}
    both, of_one = replaced(llama, parallel), {(*at, "norm"): None, (*at, "attention", "norm"): norm}
    assert both is not None
    assert of(replaced(both, of_one)) != of(both)
