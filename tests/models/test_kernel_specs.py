"""Which kernels a model needs: each once, with every recipe node that asks for it."""

from __future__ import annotations

import json

import pytest
import torch

from fastgen.compile.build.loader import KernelLoader, make_builder
from fastgen.compile.capture.tape import tape_spec
from fastgen.compile.host.thread_pool import thread_pool_spec
from fastgen.compile.render import render
from fastgen.compile.spec import KernelSpec
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.kernels import kernel_specs
from fastgen.models.registry.registry import find_recipe, list_recipes, named_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import LatentAttentionSpec, ModelSpec, MoeSpec
from tests.models import test_recipe_published, test_recipe_published_families


def needed(model: str, target: str, dtype: torch.dtype = torch.bfloat16, **changed: object) -> list[KernelSpec]:
    config = json.loads((BUILTINS[model] / "config.json").read_text()) | changed
    spec = resolve(named_recipe(model.removeprefix("tiny-")), config)
    return kernel_specs(spec, KernelLoader(make_builder(target)), dtype)


@pytest.mark.parametrize("target", ["sm_90", "portable"])
def test_a_llama_norms_its_first_input_alone_and_from_then_on_with_the_residual(target: str) -> None:
    first, others = (spec for spec in needed("tiny-llama", target) if spec.op == "rms_norm")
    assert first.parameters["residual"] is False
    assert first.needed_by == ("llama: model.layers.residual.attend.norm",)
    assert others.parameters["residual"] is True
    assert sorted(others.needed_by) == [
        "llama: model.final_norm",
        "llama: model.layers.residual.attend.norm",
        "llama: model.layers.residual.transform.norm",
    ]


@pytest.mark.parametrize("target", ["sm_90", "portable"])
def test_the_number_of_layers_makes_no_difference(target) -> None:
    few, many = (needed("tiny-llama", target, num_hidden_layers=count) for count in (2, 30))
    assert few == many
    assert [spec.needed_by for spec in few] == [spec.needed_by for spec in many]
    assert len({spec.name for spec in few}) == len(few) > 1


def test_sizes_and_features_come_from_the_configuration() -> None:
    specs = needed("tiny-opt", "gfx942", torch.float16, hidden_size=192, word_embed_proj_dim=192)
    norms = [spec for spec in specs if "norm" in spec.op]
    assert {spec.op for spec in norms} == {"layer_norm", "few_row_norm"}  # the latter of a split linear layer's sums
    assert {(spec.parameters.get("kind", "layer"), spec.parameters["bias"]) for spec in norms} == {("layer", True)}
    assert {(spec.parameters["H"], spec.parameters["dtype"]) for spec in norms} == {(192, "fp16")}
    assert {spec.op for spec in specs} >= {"attention", "qkv", "embedding", "activation", "few_row_linear"}


@pytest.mark.parametrize("model", BUILTINS)
@pytest.mark.parametrize("target", ["sm_80", "avx2"])
def test_all_that_a_model_needs_renders(model, target) -> None:
    specs = needed(model, target)
    assert "norm" in " ".join(spec.op for spec in specs)
    for spec in specs:
        assert spec.needed_by, spec
        assert f"{spec.name}(" in render(spec) or spec == thread_pool_spec()


def test_libraries_formats_and_block_sizes_are_part_of_what_a_cpu_needs() -> None:
    plain = needed("tiny-llama", "portable")
    assert thread_pool_spec() in plain
    assert tape_spec() in plain
    config = json.loads((BUILTINS["tiny-llama"] / "config.json").read_text())
    loader, spec = KernelLoader(make_builder("portable")), resolve(named_recipe("llama"), config)
    other = kernel_specs(spec, loader, torch.bfloat16, weight_format="int8", block_size=32)
    differing = {spec.op for spec in set(plain) ^ set(other)}
    assert "linear" in differing
    assert any("attention" in op for op in differing)
    assert not differing & {"sampling", "next_decodes"}


def published() -> dict[str, ModelSpec]:
    """One model of each recipe, as it was published but for the number of its layers."""
    found: dict[str, ModelSpec] = {}
    for config, _ in {**test_recipe_published.PUBLISHED, **test_recipe_published_families.PUBLISHED}.values():
        recipe = find_recipe(config)
        if recipe.name not in found:
            few = {key: min(6, config[key]) for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config}
            found[recipe.name] = resolve(recipe, config | few)
    return found


def test_every_recipe_s_kernels_are_known_before_a_gpu_is_there() -> None:
    """All that a step launches, mixtures' and latent attention's kernels and the sampler's among it, by the node."""
    loader, models = KernelLoader(make_builder("sm_90")), published()
    assert models.keys() == {listed.recipe.name for listed in list_recipes()}
    distinct: set[KernelSpec] = set()
    for name, model in models.items():
        specs = kernel_specs(model, loader, torch.bfloat16)
        distinct |= set(specs)
        ops = {spec.op for spec in specs}
        always = {"embedding", "attention", "attention_plan", "few_row_linear", "activation"}
        assert ops >= always | {"sampling_scan", "sampling_draw", "sampling_choose"}, name
        mixes = any(isinstance(part, MoeSpec) for part in model.parts())
        assert mixes == (ops >= {"moe_route", "moe_sort", "grouped_linear", "moe_combine"}), name
        is_latent = any(isinstance(attention, LatentAttentionSpec) for attention in model.attentions())
        assert (is_latent, not is_latent) == ("latent_kv" in ops, "qkv" in ops), name
        assert all(spec.needed_by for spec in specs), name
        if mixes:  # a decode's tiles, a small step's and a large one's
            products = [spec for spec in specs if spec.op == "grouped_linear"]
            assert sorted({spec.parameters["block_m"] for spec in products}) == [16, 64, 128], name
            assert all("experts" in node for spec in products for node in spec.needed_by), name
    for spec in distinct:
        assert f"{spec.name}(" in render(spec)


def row_formats(recipe: str, target: str) -> dict[str, set[object]]:
    """The formats in which norms and activations write rows, by the recipe node that needs them."""
    specs = kernel_specs(published()[recipe], KernelLoader(make_builder(target)), torch.bfloat16)
    found: dict[str, set[object]] = {}
    for spec in specs:
        for node in spec.needed_by if "row_format" in spec.parameters else ():
            found.setdefault(node.removeprefix(f"{recipe}: model."), set()).add(spec.parameters["row_format"])
    return found


def test_what_feeds_matrices_alone_is_written_as_they_read_it() -> None:
    """A mixture's router reads its norm in fp32, and so do the residual stream and the head; experts read activations
    by choice."""
    assert row_formats("llama", "avx512bf16") == {
        "layers.residual.attend.norm": {"bf16_dot"},
        "layers.residual.transform.norm": {"bf16_dot"},
        "layers.residual.transform.mlp": {"bf16_dot"},
        "final_norm": {None},
    }
    assert row_formats("deepseek_v3", "amx") == {
        "layers.residual.attend.norm": {"bf16_dot"},
        "layers.residual.attend.latent_attention.q_latent.norm": {"bf16_dot"},
        "layers.residual.transform.norm": {"bf16_dot", None},  # before a plain layer and before a mixture
        "layers.residual.transform.mlp": {"bf16_dot"},
        "layers.residual.transform.moe.shared": {"bf16_dot"},
        "layers.residual.transform.moe.experts": {None},
        "final_norm": {None},
    }
    assert row_formats("olmo2", "avx512bf16") == {
        "layers.residual.attend.output_norm": {None},
        "layers.residual.transform.output_norm": {None},
        "layers.residual.transform.mlp": {"bf16_dot"},
        "final_norm": {None},
    }
    assert row_formats("falcon", "avx512bf16")["layers.residual.both.norm"] == {"bf16_dot"}
    assert set().union(*row_formats("llama", "portable").values()) == {None}
