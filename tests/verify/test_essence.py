"""Two recipes of one essence compute the same, and only such have one."""

from __future__ import annotations

import pytest

from fastgen.models.recipe import Recipe
from fastgen.models.registry import named_recipe
from fastgen.models.resolve import resolve
from fastgen.verify.edits import replaced
from fastgen.verify.essence import essence

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
    return essence(resolve(recipe, CONFIG))


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
