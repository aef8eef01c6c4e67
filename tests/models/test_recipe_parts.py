"""The parts of the language (fused tensors, layouts, parallel parts, experts, latent attention) and their errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from fastgen.errors import RecipeError
from fastgen.models.recipe.layout import parse_layout
from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.models.resolve.parts import alibi_slopes
from fastgen.models.resolve.resolve import resolve
from fastgen.models.spec import AttentionSpec, LatentAttentionSpec, MlpSpec, ModelSpec, MoeSpec

RECIPE = """\
name: whole
architectures: [WholeForCausalLM]
config:
  vocab_size: 10
  hidden_size: 12
  num_layers: depth
  num_heads: 4
  num_kv_heads: 2
  head_dim: 6
  max_positions: 32
define: {group: num_heads // num_kv_heads, wide: 20, name: kind}
requires: [depth < 9]
model:
  embedding: {tokens: embed, scale: 2, norm: {kind: rms, weight: embed_norm, eps: 1e-5}}
  layers:
    at: h.{layer}
    residual:
      both:
        norm: {kind: layer, weight: ln, eps: 1e-5, offset: 1}
        attention:
          norm: {kind: rms, weight: ln_a, eps: 1e-5, when: layer == 1}
          qkv: {fused: qkv, layout: (num_kv_heads part head_dim) in, split: {q: group, k: 1, v: 1}, bias: true}
          q_norm: {kind: rms, weight: qn, over: head, per_head_weight: true, eps: 1e-6}
          k_norm: {kind: rms, weight: kn, over: all, eps: 1e-6}
          rotary: {kind: interleaved, theta: 100, fraction: 0.7}
          alibi: {rounding: bfloat16, scaled: true, when: layer == 0}
          softcap: 30
          output: {weight: out, layout: in out, bias: true}
        mlp:
          when: layer == 0
          kind: gated
          size: wide
          activation: "'silu'"
          fused: gate_up
          layout: (part out) in
          split: {up: 1, gate: 1}
          down: down
          bias: true
        moe:
          when: layer > 0
          router:
            {weight: route, top_k: 2, scoring: sigmoid, normalize: true, scale: 2.5, correction: route.extra,
             num_groups: 2, top_groups: 1}
          experts:
            {at: "e.{expert}", count: 4, kind: plain, size: 5, activation: "'relu'", up: up, down: down, layout: in out,
             bias: true}
          shared: {kind: plain, size: 7, activation: "'relu'", up: s.up, down: s.down, bias: false}
          shared_gate: s.gate
        output_norm: {kind: rms, weight: after, eps: 1e-5}
        scale: 0.5
  head: {weight: head, tied: false, bias: true, scale: 0.25, softcap: 15}
"""
CONFIG: dict[str, Any] = {"architectures": ["WholeForCausalLM"], "depth": 2, "kind": "x"}


def changed(tmp_path: Path, *changes: tuple[str, str]) -> Recipe:
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    file = tmp_path / "whole.yaml"
    file.write_text(text)
    return load_recipe(file)


def whole(tmp_path: Path, *changes: tuple[str, str]) -> ModelSpec:
    return resolve(changed(tmp_path, *changes), CONFIG)


def test_all_of_it(tmp_path: Path) -> None:
    spec = whole(tmp_path)
    assert (spec.embedding.scale, spec.head.scale, spec.head.softcap) == (2.0, 0.25, 15.0)
    assert spec.embedding.norm is not None
    assert spec.head.bias is not None
    assert spec.head.bias.names == ("head.bias",)
    first, second = (layer.branches[0] for layer in spec.layers)
    assert (first.scale, first.norm and first.norm.offset, first.output_norm and first.output_norm.size) == (0.5, 1, 12)
    assert [part.norm is not None for part in first.parts + second.parts] == [False, False, True, False]

    attention = first.parts[0].part
    assert isinstance(attention, AttentionSpec)
    q, k, v = (linear.weight for linear in (attention.q, attention.k, attention.v))
    assert q.names == k.names == v.names == ("h.0.qkv.weight",)
    assert [each.shape for each in (q, k, v)] == [(24, 12), (12, 12), (12, 12)]
    assert [each.stored_shape for each in (q, k, v)] == [(48, 12)] * 3
    assert [each.layout and each.layout.part for each in (q, k, v)] == [(0, 2), (2, 3), (3, 4)]
    bias = attention.v.bias
    assert bias is not None
    assert (bias.names, bias.shape, bias.stored_shape) == (("h.0.qkv.bias",), (12,), (48,))
    assert bias.layout is not None
    assert bias.layout.pattern == "(num_kv_heads part head_dim)"
    assert attention.output.weight.stored_shape == (24, 12)
    assert attention.output.weight.shape == (12, 24)
    assert attention.output.bias is not None
    assert attention.output.bias.stored_shape == (12,)
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    assert attention.q_norm.norm.weight is not None
    assert attention.k_norm.norm.weight is not None
    assert (attention.q_norm.norm.size, attention.q_norm.norm.weight.shape) == (6, (4, 6))
    assert (attention.k_norm.norm.size, attention.k_norm.norm.weight.shape) == (12, (12,))
    assert attention.rotary is not None
    assert (attention.rotary.kind, attention.rotary.dim) == ("interleaved", 4)
    assert attention.softcap == 30
    others = [part for part in spec.attentions() if isinstance(part, AttentionSpec)]
    assert [part.alibi is not None for part in others] == [True, False]

    mlp = first.parts[1].part
    assert isinstance(mlp, MlpSpec)
    assert mlp.gate is not None
    assert [each.weight.layout and each.weight.layout.part for each in (mlp.gate, mlp.up)] == [(1, 2), (0, 1)]
    assert mlp.up.weight.stored_shape == (40, 12)
    assert mlp.down.weight.layout is None

    moe = second.parts[1].part
    assert isinstance(moe, MoeSpec)
    assert (moe.router.top_k, moe.router.num_groups, moe.router.top_groups, moe.router.scale) == (2, 2, 1, 2.5)
    assert moe.router.correction is not None
    assert moe.router.correction.names == ("h.1.route.extra",)
    assert [each.down.weight.names[0] for each in moe.experts] == [f"h.1.e.{index}.down.weight" for index in range(4)]
    assert moe.experts[0].down.weight.stored_shape == (5, 12)
    assert moe.shared_gate is not None
    assert moe.shared_gate.weight.shape == (1, 12)


def test_every_tensor_is_counted_once(tmp_path: Path) -> None:
    spec = whole(tmp_path)
    attention = 48 * 12 + 48 + 24 * 12 + 12 + 24 + 12
    mlp = 2 * 20 * 12 + 40 + 20 * 12 + 12
    moe = 4 * 12 + 4 + 4 * (2 * 5 * 12 + 5 + 12) + 2 * 7 * 12 + 12
    norms = (12 + 12) * 2 + 12  # ln and after, and ln_a in the second layer
    assert spec.num_parameters == 10 * 12 + 12 + 2 * attention + mlp + moe + norms + 10 * 12 + 10
    stored = {tensor.names[0]: tensor.stored_shape for tensor in spec.tensors()}
    assert sum(math.prod(shape) for shape in stored.values()) == spec.num_parameters


@pytest.mark.parametrize(
    ("old", "new", "node", "message"),
    [
        ("(num_kv_heads part head_dim) in", "(num_heads part head_dim) in", "qkv.layout", r"4 \(num_heads\) \* 2"),
        ("(num_kv_heads part head_dim) in", "(heads part head_dim) in", "qkv.layout", "'heads' has no size"),
        ("(num_kv_heads part head_dim) in", "(name part head_dim) in", "qkv.layout", "'name' has no size"),
        ("(num_kv_heads part head_dim) in", "(num_kv_heads head_dim) in", "both.attention.qkv", "needs an axis `part`"),
        ("(num_kv_heads part head_dim) in", "(part part head_dim) in", "qkv.layout", "'part' twice"),
        ("(num_kv_heads part head_dim) in", "(num_kv_heads part head_dim)", "qkv.layout", "its input axis"),
        ("(num_kv_heads part head_dim) in", "((part head_dim)) in", "qkv.layout", "not a layout"),
        ("(num_kv_heads part head_dim) in", "'part 3 in'", "qkv.layout", "not a layout"),
        ("(num_kv_heads part head_dim) in", "[a]", "qkv.layout", "not a layout"),
        ("k: 1, v: 1", "k: 1", "qkv.split", "the key 'v' is missing"),
        ("k: 1, v: 1", "k: 1, v: 2", "qkv.layout", "24 rows, but 12 are needed for v"),
        ("k: 1, v: 1", "k: 1, v: 0", "split.v", "an integer from 1"),
        ("k: 1, v: 1", "k: 1, v: 1, w: 1", "split.w", "unknown key 'w'"),
        ("qkv: {fused: qkv,", "qkv: {fused: qkv, k: key,", "attention.qkv", "`k` cannot be given too"),
        ("fused: qkv, ", "", "attention.qkv", "needs a `q`"),
        ("split: {q: group, k: 1, v: 1}, ", "", "attention.qkv", "needs a `layout` and a `split`"),
        ("over: head, per_head", "over: all, per_head", "q_norm.per_head_weight", "one weight for all"),
        ("fraction: 0.7", "fraction: 0.5", "attention.rotary", "pairs of features, but 3 .*, an odd number"),
        ("fraction: 0.7", "fraction: 0", "rotary.fraction", "above 0 and at most 1"),
        ("fraction: 0.7", "fraction: 0.1", "rotary.fraction", "0.1 of 6 features is less than one, so none is rotated"),
        ("fraction: 0.7", "fraction: 0.5, dim: 2", "attention.rotary", "not both"),
        ("fraction: 0.7", "dim: 8", "rotary.dim", "an integer from 1 to 6"),
        ("kind: interleaved", "kind: swapped", "rotary.kind", "'half' or 'interleaved'"),
        ("rounding: bfloat16", "rounding: int8", "alibi.rounding", "'float32' or 'bfloat16'"),
        ("scaled: true", "scaled: depth", "alibi.scaled", "must be true or false, not 'depth'"),
        ("softcap: 30", "softcap: -1", "attention.softcap", "above 0, or none"),
        ("softcap: 15", "softcap: kind", "head.softcap", "finite number"),
        ("layout: in out", "layout: out out", "output.layout", "'out' twice"),
        ("layout: in out", "layout: in hidden_size part", "output.layout", "'part' has no size"),
        ("layout: in out", "layout: in head_dim", "output.layout", "6 .* rows, but 12 are needed"),
        ("split: {up: 1, gate: 1}", "split: {up: 1, gate: 2}", "mlp.layout", "40 rows, but 20 are needed for gate"),
        ("fused: gate_up", "fused: gate_up\n          gate: g", "both.mlp", "`gate` cannot be given too"),
        ("when: layer == 0\n          kind", "when: true\n          kind", "residual.both", "both present in layer 1"),
        ("top_k: 2", "top_k: 5", "router.top_k", "an integer from 1 to 4"),
        ("top_groups: 1", "top_groups: 3", "router.top_groups", "an integer from 1 to 2"),
        ("num_groups: 2", "num_groups: 3", "router.num_groups", "cannot be divided into 3 equal groups"),
        ("top_k: 2", "top_k: 3", "router.top_groups", "1 groups of 2 experts are fewer than top_k, which is 3"),
        ("scale: 2.5", "scale: 0", "router.scale", "other than 0"),
        ("e.{expert}", "e", "experts.at", r"must contain \{expert\}"),
        ("e.{expert}", "e.{expert}.{other}", "experts.at", "only placeholders"),
        ("count: 4", "count: 0", "experts.count", "an integer from 1"),
        ("correction: route.extra", "correction: ln.weight", "router.correction", "claimed twice"),
        ("up: s.up", "up: e.0.up", "shared.up", "claimed twice"),
        ("fused: gate_up", "fused: qkv", "mlp.fused", "'h.0.qkv.weight' is claimed twice"),
        ("scale: 0.5", "scale: 0", "both.scale", "other than 0"),
        ("embed, scale: 2", "embed, scale: none", "embedding.scale", "finite number"),
        ("wide: 20", "wide: width", "define.wide", "no key 'width'"),
        ("wide: 20", "head_dim: 20", "", "another meaning"),
        ("requires: [depth < 9]", "requires: [depth < 9, depth > 5]", "requires.1", "`depth > 5` is true.*depth is 2"),
        ("requires: [depth < 9]", "requires: [depth]", "requires.0", "true or false"),
    ],
)  # fmt: skip
def test_errors_about_parts_have_a_location(tmp_path: Path, old: str, new: str, node: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        whole(tmp_path, (old, new))
    error = caught.value
    assert error.file == str(tmp_path / "whole.yaml")
    assert error.line is not None
    assert (error.node or "").endswith(node)
    if node:
        key = node.split(".")[-1]
        line = (tmp_path / "whole.yaml").read_text().splitlines()[error.line - 1]
        assert key in line or key.isdecimal()


def test_a_branch_without_any_of_its_parts(tmp_path: Path) -> None:
    text = RECIPE[: RECIPE.index("        attention:")] + RECIPE[RECIPE.index("        mlp:") :]
    file = tmp_path / "whole.yaml"
    file.write_text(text.replace("when: layer == 0", "when: false").replace("when: layer > 0", "when: false"))
    with pytest.raises(RecipeError, match="all of its parts are absent") as caught:
        resolve(load_recipe(file), CONFIG)
    assert caught.value.node == "model.layers.residual.both"


def test_defined_values_are_not_keys_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="- wide is not known"):
        resolve(changed(tmp_path), CONFIG | {"wide": 3})
    with pytest.raises(RecipeError, match="- kind is not known"):
        resolve(changed(tmp_path, (", name: kind", "")), CONFIG)
    own = changed(
        tmp_path, ("wide: 20", "wide: wide | default(20)")
    )  # a name may equal that of the key it is derived from
    spec = resolve(own, CONFIG | {"wide": 3})
    mlp = spec.layers[0].branches[0].parts[1].part
    assert isinstance(mlp, MlpSpec)
    assert mlp.up.out_features == 3


LATENT = """\
        latent_attention:
          nope_dim: 4
          rope_dim: 2
          v_head_dim: 3
          q: {weight: q, when: layer == 0}
          q_latent: {rank: 7, down: qd, norm: {kind: rms, weight: qn, eps: 1e-6}, up: qu, when: layer == 1}
          kv_latent:
            {rank: 5, down: kd, norm: {kind: rms, weight: kn, eps: 1e-6}, fused: ku, layout: (num_heads part) in,
             split: {k: 4, v: 3}}
          bias: true
          rotary: {theta: 100}
          output: {weight: out, bias: false}
"""


def latent(tmp_path: Path, old: str = "", new: str = "") -> ModelSpec:
    assert old in LATENT
    before, after = RECIPE[: RECIPE.index("        attention:")], RECIPE[RECIPE.index("        mlp:") :]
    file = tmp_path / "whole.yaml"
    file.write_text(before + LATENT.replace(old, new, 1) + after)
    return resolve(load_recipe(file), CONFIG)


def test_latent_attention(tmp_path: Path) -> None:
    spec = latent(tmp_path)
    direct, through = (part for part in spec.attentions() if isinstance(part, LatentAttentionSpec))
    assert (direct.q_down, direct.q_norm, direct.q.weight.shape) == (None, None, (24, 12))
    assert through.q_down is not None
    assert through.q_norm is not None
    assert (through.q_down.weight.shape, through.q_norm.size, through.q.weight.shape) == ((7, 12), 7, (24, 7))
    assert (direct.kv_down.weight.shape, direct.kv_norm.size) == ((7, 12), 5)
    assert (direct.k_up.weight.shape, direct.v_up.weight.shape) == ((16, 5), (12, 5))
    assert direct.k_up.weight.stored_shape == direct.v_up.weight.stored_shape == (28, 5)
    assert direct.output.weight.shape == (12, 12)
    assert (direct.scale, direct.rotary.dim) == (6**-0.5, 2)
    assert spec.kv_bytes_per_token(4) == 2 * (5 + 2) * 4


@pytest.mark.parametrize(
    ("old", "new", "node", "message"),
    [
        ("rope_dim: 2", "rope_dim: 4", "latent_attention", r"4 \+ 4, but config.head_dim is 6"),
        ("when: layer == 1", "when: true", "latent_attention", "exactly one of `q` and `q_latent`.* 2"),
        ("when: layer == 0", "when: false", "latent_attention", "exactly one of `q` and `q_latent`.* 0"),
        ("(num_heads part) in", "(num_heads) in", "kv_latent", "an axis `part`"),
        ("k: 4, v: 3", "k: 3, v: 3", "kv_latent.layout", "12 rows, but 16 are needed for k"),
        ("theta: 100", "theta: 100, when: false", "rotary", "needs a rotary"),
        ("weight: kn, eps", "weight: kn, when: false, eps", "norm", "needs a norm"),
        ("up: qu", "up: ku", "fused", "claimed twice"),
    ],
)
def test_a_latent_attention_that_does_not_fit(tmp_path: Path, old: str, new: str, node: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        latent(tmp_path, old, new)
    assert str(caught.value.node).endswith(node)
    assert caught.value.line is not None


@given(st.permutations(["a", "b", "head_dim", "part", "in"]), st.lists(st.booleans(), min_size=5, max_size=5))
def test_a_layout_reads_back_as_written(names: list[str], together: list[bool]) -> None:
    groups: list[list[str]] = []
    for name, joined in zip(names, together, strict=True):
        if joined and groups:
            groups[-1].append(name)
        else:
            groups.append([name])
    text = " ".join(f"({' '.join(group)})" if len(group) > 1 else group[0] for group in groups)
    axes = parse_layout(text)
    assert str(axes) == text
    assert [list(group) for group in axes.groups] == groups
    assert axes.of_bias().names == tuple(name for name in names if name != "in")


@pytest.mark.parametrize(
    "text", ["", "in )", "(in", "in  (", "a-b in", "in\nout", "1 in", "in ...", "()", "in *", "é in"]
)
def test_a_text_that_is_no_layout(text: str) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        parse_layout(text)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 8, 12, 32, 71, 112, 232])
def test_slopes_as_in_transformers(num_heads: int) -> None:
    mask = torch.ones(1, 2, dtype=torch.long)
    expected = build_alibi_tensor(mask, num_heads, torch.float32)[:, 0, 1]  # slope times 1, in bf16
    slopes = torch.tensor(alibi_slopes(num_heads))
    assert torch.equal(slopes.bfloat16().float(), expected)
