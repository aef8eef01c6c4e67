"""``fastgen recipe``: for people and as JSON, without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
BUILT_IN = sorted(file.stem for file in RECIPES.glob("*.yaml"))
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MISTRAL))
    return file


def test_list(run: Any) -> None:
    done = run("recipe", "list")
    assert done.status == 0
    header, *rows = done.out.splitlines()
    assert header.split() == ["recipe", "architectures", "from"]
    assert [row.split()[0] for row in rows] == BUILT_IN
    assert ["mistral", "MistralForCausalLM", "built-in"] in [row.split() for row in rows]


def test_list_as_json(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nextends: llama\narchitectures: [Mine]\n")
    monkeypatch.setenv("FASTGEN_RECIPES", str(tmp_path))
    rows = json.loads(run("recipe", "list", "--json").out)
    assert rows[0] == {
        **{"name": "mine", "architectures": ["Mine"], "origin": "environment"},
        "file": str(tmp_path / "mine.yaml"),
    }
    assert [row["name"] for row in rows] == ["mine", *BUILT_IN]


@pytest.mark.parametrize("name", ["llama", "mistral", "opt"])
def test_show_prints_the_recipe_as_it_is(run: Any, name: str) -> None:
    text = (RECIPES / f"{name}.yaml").read_text()
    assert run("recipe", "show", name).out == text
    assert run("recipe", "show", str(RECIPES / f"{name}.yaml")).out == text
    shown = json.loads(run("recipe", "show", name, "--json").out)
    assert (shown["name"], shown["text"], Path(shown["file"]).name) == (name, text, f"{name}.yaml")
    assert shown["resolved"]["model"]["layers"]["residual"].keys() == {"attend", "transform"}


def test_show_with_a_configuration(run: Any, config: Path) -> None:
    done = run("recipe", "show", "mistral", "--config", str(config))
    assert done.status == 0
    facts = {line[:14].strip(): line[14:].strip() for line in done.out.split("\n\n")[0].splitlines()}
    assert facts["recipe"] == "mistral, for MistralForCausalLM"
    assert facts["parameters"] == "7,241,732,096"
    assert facts["KV cache"] == "131,072 bytes a token (bfloat16)"
    assert facts["FLOPs a token"].startswith("14,221,312,000 with 1 in context, ")
    assert facts["positions"] == "32,768"
    table = done.out.split("\n\n")[1].splitlines()
    attend = next(line for line in table if "attend" in line)
    assert attend.startswith("layers 0–31")  # all alike, so printed once
    assert "32 heads, 8 of K and V, 128 wide, rotary θ 10000, window 4096".replace("4096", "4,096") in attend
    assert attend.endswith("41,947,136 × 32")
    assert sum("attend" in line for line in table) == 1
    assert run("recipe", "show", "mistral", "--config", str(config.parent)).out == done.out


def test_show_with_a_configuration_as_json(run: Any, config: Path) -> None:
    facts = json.loads(run("recipe", "show", "mistral", "--config", str(config), "--json").out)
    assert facts["num_parameters"] == 7_241_732_096
    assert facts["kv_bytes_per_token"] == 131_072
    assert facts["flops_per_token"]["1"] == 14_221_312_000
    assert [(group["indices"], group["count"]) for group in facts["layers"]] == [("0–31", 32)]
    assert len(facts["tensors"]) == 2 + 32 * 9 + 1
    assert facts["tensors"][0] == {"names": ["model.embed_tokens.weight"], "shape": [32000, 4096]}


def test_layers_that_differ_are_told_apart(run: Any, tmp_path: Path, config: Path) -> None:
    (tmp_path / "mixed.yaml").write_text(
        "name: mixed\nextends: mistral\nmodel: {layers: {residual: {attend: {attention: {sliding_window: "
        "'sliding_window if layer in [0, 5] else none'}}}}}\n"
    )
    arguments = ("recipe", "show", str(tmp_path / "mixed.yaml"), "--config", str(config))
    facts = json.loads(run(*arguments, "--json").out)
    assert [group["indices"] for group in facts["layers"]] == ["0", "1–4", "5", "6–31"]
    lines = run(*arguments).out.splitlines()
    assert [line.split("  ")[0] for line in lines if "attend" in line] == [
        *("layer 0", "layers 1–4", "layer 5", "layers 6–31")
    ]


def test_a_mixture_over_a_latent_vector(run: Any, tmp_path: Path) -> None:
    config = {
        **{"architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3},
        **{"num_attention_heads": 2, "q_lora_rank": None, "kv_lora_rank": 4, "qk_nope_head_dim": 6, "v_head_dim": 8},
        **{"qk_rope_head_dim": 2, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 3},
        **{"intermediate_size": 20, "first_k_dense_replace": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = run("recipe", "show", "deepseek_v2", "--config", str(tmp_path)).out.splitlines()
    assert any("36 bytes a token" in line for line in lines)  # 3 layers of 4 + 2 features of two bytes
    assert any(line.startswith("layer 0 ") and "latent attention: 2 heads, 6 + 2 wide" in line for line in lines)
    assert any("gated mlp: 16 → 20, silu" in line and "experts" not in line for line in lines)
    assert any("2 of 5 experts by softmax, each gated mlp: 16 → 3, silu, and one for all" in line for line in lines)
    facts = json.loads(run("recipe", "show", "deepseek_v2", "--config", str(tmp_path), "--json").out)
    assert [(group["indices"], group["count"]) for group in facts["layers"]] == [("0", 1), ("1–2", 2)]
    names = [tensor["names"][0] for tensor in facts["tensors"]]
    assert len(names) == len(set(names))
    shared = {"names": ["model.layers.0.self_attn.kv_b_proj.weight"], "shape": [2 * (6 + 8), 4]}
    assert shared in facts["tensors"]


def test_parallel_parts_are_told_below_each_other(run: Any, tmp_path: Path) -> None:
    config = {"architectures": ["FalconForCausalLM"], "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    lines = run("recipe", "show", "falcon", "--config", str(tmp_path)).out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("layers 0–1"))
    assert "attention: 4 heads, 1 of K and V, 4 wide, rotary θ 10000" in lines[start]
    assert lines[start + 1].strip() == "plain mlp: 16 → 64, gelu"


def test_schema(run: Any) -> None:
    schema = json.loads(run("recipe", "schema").out)
    assert schema == json.loads(run("recipe", "schema", "--json").out)
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)  # once, which validate() would do for each file
    for file in RECIPES.glob("*.yaml"):
        validator(schema).validate(yaml.load(file.read_text(), SAFE_LOADER))


def test_a_key_may_be_let_pass(run: Any, config: Path) -> None:
    config.write_text(json.dumps(MISTRAL | {"odd_key": 3}))
    refused = run("recipe", "show", "mistral", "--config", str(config))
    assert refused.status == 1
    assert f"{config}: recipe 'mistral' does not account" in refused.err
    assert "odd_key is not known to the recipe" in refused.err
    assert run("recipe", "show", "mistral", "--config", str(config), "--allow-config-key", "odd_key").status == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "lama"], "did you mean 'llama'"),
        (["show", "absent/recipe.yaml"], "absent/recipe.yaml: cannot be read"),
        (["show", "llama", "--config", "absent/config.json"], "absent/config.json: cannot be read"),
        (["show", "llama", "--config", "CONFIG"], "config.json:1:2: is not valid JSON"),
    ],
)
def test_a_mistake_is_told_in_one_line(run: Any, config: Path, arguments: list[str], message: str) -> None:
    config.write_text("{")
    done = run("recipe", *(str(config) if argument == "CONFIG" else argument for argument in arguments))
    assert (done.status, done.out) == (1, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_no_terminal_is_too_narrow_for_whole_words(
    run: Any, config: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    def words(text: str) -> list[str]:
        return sorted(re.sub(r"\x1b\[[0-9;]*m", "", text).split())

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    wide = run("recipe", "show", "mistral", "--config", str(config))
    narrow = run("recipe", "show", "mistral", "--config", str(config), terminal=True)
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in narrow.out.splitlines()) <= columns
    assert set(words(narrow.out)) == set(words(wide.out))
    assert "attention: 32 heads" in wide.out


def test_torch_is_not_needed(config: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from fastgen.cli.recipe import app; "
        f"app(['show', 'mistral', '--config', {str(config)!r}], standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "7,241,732,096" in done.stdout
