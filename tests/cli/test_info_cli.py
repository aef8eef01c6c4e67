"""``fastgen info``: the facts it prints agree with the model and the machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
from safetensors import safe_open

import fastgen
from benchmarks.cpu.ledger import held_bytes
from fastgen.cli.options import in_flags
from fastgen.compile.backends import choose
from fastgen.compile.build.cpp import cpp_arch
from fastgen.compile.host import device
from fastgen.compile.host.device import current
from fastgen.compile.ops.linear.bf16_tuning import bf16_choice
from fastgen.errors import (
    CompilerNotFoundError,
    FastgenError,
    InvalidArgumentError,
    KernelError,
    OutOfMemoryError,
    RecipeError,
)
from fastgen.models.checkpoint.builtins import BUILTINS


def test_versions_and_device(run) -> None:
    done = run("info", "--json", "--device", "cpu")
    facts = json.loads(done.out)
    assert set(facts) == {"versions", "device"}
    assert facts["versions"]["fastgen"] == fastgen.__version__
    assert facts["versions"]["torch"] == version("torch")
    cpu = current("cpu")
    assert 0 < facts["device"].pop("free_memory_bytes") <= cpu.memory_bytes
    choice = bf16_choice(cpu)
    assert facts["device"].pop("bf16") == (choice and f"{choice.arch} ({choice.reason})")
    assert facts["device"] == {
        "device": "cpu",
        "name": cpu.name,
        "memory_bytes": cpu.memory_bytes,
        "cores": cpu.num_cores,
        "instruction_sets": list(cpu.instruction_sets),
        "kernels_for": cpp_arch(cpu),
        "matrix_unit": "AMX" if cpp_arch(cpu) == "amx" else None,
    }


def test_a_matrix_unit_is_named(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def unit(**more: Any) -> tuple[str, str | None]:
        cpu = replace(current("cpu"), **more)
        monkeypatch.setattr(device, "current", lambda _name: cpu)
        facts = json.loads(run("info", "--json").out)["device"]
        return facts["kernels_for"], facts["matrix_unit"]

    sets = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16")
    monkeypatch.setenv("FASTGEN_EMULATE_AMX", "0")
    monkeypatch.delenv("FASTGEN_CPP_ARCH", raising=False)
    assert unit(instruction_sets=(*sets, *device.AMX)) == ("amx", "AMX")
    assert unit(instruction_sets=sets) == ("avx512bf16", None)
    refusal = "the system refused the matrix unit: Invalid argument"
    assert unit(instruction_sets=sets, amx_refusal=refusal) == ("avx512bf16", refusal)
    monkeypatch.setenv("FASTGEN_CPP_ARCH", "avx2")
    assert unit(instruction_sets=(*sets, *device.AMX)) == ("avx2", "AMX, not used")
    monkeypatch.setenv("FASTGEN_CPP_ARCH", "amx")
    monkeypatch.setenv("FASTGEN_EMULATE_AMX", "1")
    assert unit(instruction_sets=sets) == ("amx", "AMX, emulated")


def test_for_people(run) -> None:
    out = run("info").out
    assert f"  torch                {version('torch')}\n" in out
    assert "  memory " in out
    assert "  free memory " in out


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-opt"])
def test_the_facts_of_a_model_are_those_of_its_checkpoint(run, name) -> None:
    model = json.loads(run("info", name, "--json").out)["model"]
    directory = BUILTINS[name]
    config = json.loads((directory / "config.json").read_text())
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        num_parameters = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    assert model["directory"] == str(directory)
    assert model["architecture"] == config["architectures"][0]
    assert model["recipe"] == name.removeprefix("tiny-")
    assert model["parameters"] == num_parameters
    assert model["weights_bytes"] == num_parameters * 2
    assert model["dtype"] == "bfloat16"
    assert model["context"] == config["max_position_embeddings"] == 2048
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    assert model["kv_bytes_per_token"] == config["num_hidden_layers"] * 2 * num_kv_heads * head_dim * 2
    assert json.loads(run("info", name, "--json", "--dtype", "float32").out)["model"]["weights_bytes"] == (
        num_parameters * 4
    )


def test_the_memory_of_an_engine_is_that_of_the_engine(run) -> None:
    sizes = {"token_budget": 40, "max_num_seqs": 3, "block_size": 16, "max_model_len": 100, "num_threads": 1}
    flags = [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    facts = json.loads(run("info", "tiny-llama", "--json", "--kv-cache-memory", "1MiB", *flags).out)
    printed = facts["ledger"]
    with fastgen.load("tiny-llama", kv_cache_memory="1MiB", **sizes) as llm:
        assert printed == llm.ledger.as_json()
        table = llm.ledger.explained().splitlines()
        engine = llm._engine
        assert engine is not None
        blocks_each = engine.scheduler.kv.capacity.blocks_needed(sizes["max_model_len"])
        fits = min(sizes["max_num_seqs"], (llm.config.num_blocks - 1) // blocks_each)
    assert facts["engine"] == {
        **{name: sizes[name] for name in ("token_budget", "max_num_seqs", "max_model_len")},
        "full_length_requests": fits,
    }
    out = run("info", "tiny-llama", "--kv-cache-memory", "1MiB", *flags).out
    assert f"  full length requests {fits}\n" in out
    assert out.endswith("memory of the engine\n" + "".join(f"  {line}\n" for line in table))
    assert sum(row["size_bytes"] for row in printed["rows"]) == printed["total_bytes"]


def test_the_parts_of_ranks(run) -> None:
    """Before a weight is read: heads, features and tokens of a rank, and bytes that add up."""
    facts = json.loads(run("info", "tiny-llama", "--json", "--tensor-parallel", "2", "--token-budget", "40").out)
    model, plan = facts["model"], facts["tensor_parallel"]
    config = json.loads((BUILTINS["tiny-llama"] / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers, features = config["num_hidden_layers"], config["intermediate_size"]
    assert plan["ranks"] == 2
    assert "2" in plan["possible"]
    assert plan["a_rank_has"] == [
        f"vocabulary: {config['vocab_size'] // 2} of {config['vocab_size']} tokens",
        f"{layers} x attention: {heads // 2} of {heads} heads, {kv_heads // 2} of {kv_heads} KV heads",
        f"{layers} x feed-forward: {features // 2} of {features} features",
    ]
    assert plan["sums_of_a_step"] == 1 + 2 * layers
    assert model["weights_bytes"] < plan["weights_bytes_of_all"] < 1.01 * model["weights_bytes"]  # norms are whole
    assert plan["kv_bytes_per_token"] == model["kv_bytes_per_token"] // 2
    out = run("info", "tiny-llama", "--tensor-parallel", "2").out
    assert "\nmemory of rank 0 of 2\n" in out
    assert f"\n  a rank has           {plan['a_rank_has'][0]}\n{23 * ' '}{plan['a_rank_has'][1]}\n" in out


@pytest.mark.slow  # builds the kernels of a rank
def test_the_memory_of_ranks_is_that_of_the_engine(run) -> None:
    facts = json.loads(run("info", "tiny-llama", "--json", "--tensor-parallel", "2", "--token-budget", "40").out)
    with fastgen.load("tiny-llama", tensor_parallel=2, token_budget=40) as llm:
        assert facts["ledger"] == llm.ledger.as_json()
        held = held_bytes(llm._engine)
    rows = {row["name"]: row["size_bytes"] for row in facts["ledger"]["rows"]}
    assert {name: size for name, size in held.items() if size} == {name: rows[name] for name in held if held[name]}


def test_ranks_that_do_not_divide_the_model_are_refused(run) -> None:
    done = run("info", "tiny-llama", "--tensor-parallel", "3")
    assert done.status == 1
    assert "heads cannot be split evenly; LlamaForCausalLM can be split over 1, 2" in done.err


def test_how_many_requests_of_full_length_fit(run) -> None:
    """A small cache holds fewer than may run at once."""
    sizes = (("--kv-cache-memory", "16MiB"), ("--kv-cache-memory", "32MiB"), ())
    facts = [json.loads(run("info", "tiny-llama", "--json", *flags).out) for flags in sizes]
    fits = [each["engine"]["full_length_requests"] for each in facts]
    each_bytes = facts[0]["model"]["kv_bytes_per_token"] * facts[0]["model"]["context"]
    assert fits == [((16 << 20) - 1) // each_bytes, ((32 << 20) - 1) // each_bytes, 64]


def test_a_format_of_the_cpp_target_without_a_compiler(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none() -> str:
        raise CompilerNotFoundError("no C++ compiler: Install g++ or clang++")

    monkeypatch.setattr(choose, "find_compiler", find_none)
    done = run("info", "tiny-llama", "--quantize", "int8")
    assert done.status == 1
    assert "Install g++ or clang++; without one --quantize 'int8' cannot be computed, but torch computes" in done.err
    assert "'int8_weight_only'" in done.err
    assert "several times more slowly" not in done.err


def test_an_engine_that_does_not_fit_is_an_error(run) -> None:
    done = run("info", "tiny-llama", "--kv-cache-memory", "999TiB")
    assert done.status != 0
    assert "it fits with --kv-cache-memory " in done.err


def test_a_model_that_does_not_exist(run) -> None:
    done = run("info", "tiny-lama/")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("fastgen: ")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RecipeError("let pass once with allow_config_keys="), "let pass once with --allow-config-key"),
        (RecipeError("pass recipe= to say which"), "pass --recipe to say which"),
        (RecipeError('pass recipe="checkpoint" to use it'), 'pass --recipe "checkpoint" to use it'),
        (InvalidArgumentError("num_threads=0: expected"), "--num-threads 0: expected"),
        (InvalidArgumentError("dtype='int3': expected"), "--dtype 'int3': expected"),
        (InvalidArgumentError("max_num_seqs=9 is above token_budget=3"), "--max-num-seqs 9 is above --token-budget 3"),
        (
            OutOfMemoryError("raise kv_cache_memory or lower block_size"),
            "raise --kv-cache-memory or lower --block-size",
        ),
        (
            InvalidArgumentError("allow_config_keys: x has no key 'block_size'"),
            "--allow-config-key: x has no key 'block_size'",
        ),
        # what is no argument stays
        (RecipeError("block_size is not known to the recipe"), "block_size is not known to the recipe"),
        (RecipeError("wrong", file="runs/dtype=bf16/a.yaml"), "runs/dtype=bf16/a.yaml: wrong"),
        (RecipeError("the device of a recipe"), "the device of a recipe"),
        (KernelError("broken", spec="norm(H=8, dtype=bf16)"), "broken\n  kernel: norm(H=8, dtype=bf16)"),
    ],
)
def test_errors_name_arguments_by_their_flags(error: FastgenError, message: str) -> None:
    assert in_flags(error) == message
