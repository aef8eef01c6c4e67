"""Every argument of ``load`` reaches what it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fastgen
from fastgen.compile.build.cpp import CppBuilder
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.device import Device
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.errors import InvalidArgumentError, ModelNotFoundError, RecipeError, UnknownArchitectureError
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.models.checkpoint import hub
from fastgen.options import LoadOptions
from fastgen.runtime.arrangement import check_arrangement, device_of_rank, threads_of_rank
from fastgen.runtime.scheduling.policies import DynamicBatching
from fastgen.runtime.scheduling.policies.orca import Orca
from fastgen.runtime.scheduling.policies.splitfuse import SplitFuse
from fastgen.runtime.scheduling.policies.time_budget import TimeBudgetSplitFuse
from tests.runtime.checkpoints import WINDOW, save_checkpoint

PROMPT = [5, 17, 99, 3]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def changed(directory: Path, tmp_path: Path) -> Any:
    """A copy of the checkpoint with other values in its ``config.json``."""

    def change(**values: Any) -> Path:
        for file in directory.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text()) | values
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return change


def answer(model: Path, **options: Any) -> list[int]:
    with fastgen.load(model, **options) as llm:
        return llm.generate(PROMPT, max_new_tokens=8, temperature=0, ignore_eos=True).token_ids


def test_a_recipe_takes_the_place_of_the_one_that_claims_the_architecture(changed: Any, directory: Path) -> None:
    model = changed(architectures=["SomebodysForCausalLM"])
    with pytest.raises(UnknownArchitectureError, match="SomebodysForCausalLM"):
        fastgen.load(model)
    assert answer(model, recipe="llama") == answer(directory)
    with pytest.raises(RecipeError, match=r"no fastgen\.yaml"):
        fastgen.load(directory, recipe="checkpoint")


def test_unknown_keys_are_accepted_with_allow_config_keys(changed: Any, directory: Path) -> None:
    model = changed(frobnicate=3)
    with pytest.raises(RecipeError, match="frobnicate"):
        fastgen.load(model)
    assert answer(model, allow_config_keys=["frobnicate"]) == answer(directory)


def test_a_revision_is_passed_on(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    asked = []

    def locate(model: str | Path, *, revision: str | None = None) -> Path:
        asked.append((model, revision))
        return directory

    monkeypatch.setattr(hub, "locate", locate)
    fastgen.load("owner/name", revision="v2").close()
    fastgen.load("owner/name").close()
    assert asked == [("owner/name", "v2"), ("owner/name", None)]
    monkeypatch.undo()
    with pytest.raises((InvalidArgumentError, ModelNotFoundError), match="revision"):
        fastgen.load(directory, revision="v2")


def test_the_checkpoints_dtype_is_kept_unless_another_is_asked_for(directory: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for options, dtype in [({}, torch.bfloat16), ({"dtype": "float16"}, torch.float16)]:
        with fastgen.load(tmp_path, target="torch", **options) as llm:
            assert llm._engine is not None
            runner = llm._engine.runner
            assert {parameter.dtype for parameter in runner.model.parameters()} == {dtype}
            assert {tensor.dtype for pair in runner.kv_cache.storage for tensor in pair} == {dtype}


def test_the_number_of_threads(directory: Path) -> None:
    before = torch.get_num_threads()
    try:
        fastgen.load(directory, target="torch", num_threads=before + 1).close()
        assert torch.get_num_threads() == before + 1
        fastgen.load(directory, target="cpp", num_threads=before + 1).close()
        assert load_thread_pool(KernelLoader(CppBuilder("portable"))).num_threads == before + 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "num_threads"),
    [(None, 8, 1, None), (3, 8, 1, 3), (None, 8, 2, 4), (6, 8, 2, 3), (7, 8, 4, 1), (None, 1, 2, 1), (1, 8, 2, 1)],
)
def test_ranks_share_the_threads(asked: int | None, cores: int, ranks: int, num_threads: int | None) -> None:
    options = LoadOptions(model="tiny-llama", num_threads=asked, tensor_parallel=ranks)
    assert threads_of_rank(options, Device("cpu", "some", 1 << 30, num_cores=cores)) == num_threads


def test_at_most_two_ranks_share_a_core() -> None:
    device = Device("cpu", "some", 1 << 30, num_cores=2)
    check_arrangement(LoadOptions(model="tiny-llama", tensor_parallel=4), device)
    message = "tensor_parallel=5: this machine has 2 cores, and at most two ranks share one; ask for at most 4"
    with pytest.raises(InvalidArgumentError, match=message):
        check_arrangement(LoadOptions(model="tiny-llama", tensor_parallel=5), device)


@pytest.mark.parametrize("sealed", [True, "a bundle"])
def test_a_bundle_is_for_one_rank(sealed: bool | str) -> None:
    device = Device("cpu", "some", 1 << 30, num_cores=2)
    check_arrangement(LoadOptions(model="tiny-llama", sealed=sealed), device)
    with pytest.raises(InvalidArgumentError, match="tensor_parallel=2: a sealed bundle has the kernels of one rank"):
        check_arrangement(LoadOptions(model="tiny-llama", sealed=sealed, tensor_parallel=2), device)


@pytest.mark.parametrize(
    ("kind", "asked", "ranks", "num_bytes"),
    [
        ("cpu", None, 1, 1 << 30),
        ("cpu", None, 2, 1 << 29),
        ("cpu", "600MiB", 3, 200 << 20),
        ("cpu", "2GiB", 1, 1 << 30),
        ("cuda", None, 2, 1 << 30),
        ("cuda", "100MiB", 2, 100 << 20),
    ],
)
def test_ranks_of_a_cpu_share_its_memory(kind: Any, asked: str | None, ranks: int, num_bytes: int) -> None:
    options = LoadOptions(model="tiny-llama", memory=asked, tensor_parallel=ranks)
    assert device_of_rank(Device(kind, "some", 1 << 30, num_cores=8), options).memory_bytes == num_bytes


def test_the_sizes(directory: Path) -> None:
    sizes = {"token_budget": 24, "max_num_seqs": 5, "block_size": 8, "max_model_len": 40}
    with fastgen.load(directory, kv_cache_memory="100KB", device="cpu", **sizes) as llm:
        assert {name: getattr(llm.config, name) for name in sizes} == sizes
        assert llm._engine is not None
        block_bytes = 2 * 2 * 8 * 1 * 8 * 4  # keys and values, layers, tokens, KV heads, head size, fp32
        assert llm._engine.runner.kv_cache.size_bytes == llm.config.num_blocks * block_bytes <= 100_000
        assert llm.config.num_blocks == 100_000 // block_bytes
        assert llm._engine.scheduler.kv.pool.capacity == llm.config.num_blocks - 1


def test_the_policy_and_what_goes_with_it(directory: Path) -> None:
    for options, kind in [({}, SplitFuse), ({"policy": "orca"}, Orca), ({"itl_target_ms": 40}, TimeBudgetSplitFuse)]:
        with fastgen.load(directory, aging_s=7.0, **options) as llm:
            assert llm._engine is not None
            assert type(llm._engine.scheduler.policy) is kind
            assert llm._engine.scheduler.waiting.aging_s == 7.0
            assert llm.generate(PROMPT, max_new_tokens=3, ignore_eos=True).finish_reason == "length"
    with fastgen.load(directory, policy=DynamicBatching(batch_size=3, max_delay_s=0.05)) as llm:
        output = llm.generate(PROMPT, max_new_tokens=3)
        assert output.metrics.queue_s >= 0.05, "no other request arrived, so the batch started when the delay was over"


def test_the_memory_of_the_cache_is_there_before_steps_are_measured(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[PagedKVCache] = []
    monkeypatch.setattr(PagedKVCache, "touch", lambda cache: touched.append(cache))
    fastgen.load(directory).close()
    assert touched == []
    fastgen.load(directory, itl_target_ms=40).close()
    assert len(touched) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "orcas"}, "policy='orcas' is not known; did you mean 'orca'"),
        ({"policy": "static", "itl_target_ms": 40}, "itl_target_ms=40 goes with policy='splitfuse' only"),
        ({"policy": DynamicBatching(9), "max_num_seqs": 8}, "batch_size=9 is above max_num_seqs=8"),
        ({"aging_s": 0}, "aging_s=0: expected a number of seconds above 0"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        fastgen.load(directory, **options)


def test_prefix_caching_is_on_unless_it_is_turned_off(directory: Path) -> None:
    for options, expected in [({}, True), ({"prefix_caching": True}, True), ({"prefix_caching": False}, False)]:
        with fastgen.load(directory, target="torch", **options) as llm:
            assert llm._engine is not None
            assert (llm._engine.scheduler.kv.prefix_cache is not None) == llm.config.prefix_caching == expected
    with pytest.raises(InvalidArgumentError, match="prefix_caching='no': expected True or False"):
        fastgen.load(directory, prefix_caching="no")  # type: ignore[arg-type]


def test_windows_are_handed_to_the_cache(tmp_path: Path) -> None:
    with fastgen.load(save_checkpoint("mistral", tmp_path), target="torch", token_budget=40) as llm:
        assert llm._engine is not None
        kv = llm._engine.scheduler.kv
        assert (kv.windows, kv.max_chunk) == ((WINDOW,), 40)


def test_the_end_of_text_is_forbidden_while_min_new_tokens_asks_for_more(directory: Path) -> None:
    with fastgen.load(directory) as llm:
        assert llm.generate(PROMPT, max_new_tokens=9, logit_bias={2: 100}).token_ids == [2]
        output = llm.generate(PROMPT, max_new_tokens=9, logit_bias={2: 100}, min_new_tokens=4)
    assert output.finish_reason == "stop"
    assert [token_id == 2 for token_id in output.token_ids] == [False] * 4 + [True]


def test_a_default_dtype_of_torch_that_is_changed_is_refused(directory: Path) -> None:
    torch.set_default_dtype(torch.float16)
    try:
        with pytest.raises(InvalidArgumentError, match=r"torch's default dtype is torch.float16, .*say dtype= to load"):
            fastgen.load(directory)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("by_call", [True, False])
def test_a_default_device_of_torch_that_is_changed_is_refused(directory: Path, by_call: bool) -> None:
    refused = pytest.raises(InvalidArgumentError, match=r"torch's default device is meta, .*say device= to load")
    if by_call:
        torch.set_default_device("meta")
        try:
            with refused:
                fastgen.load(directory)
        finally:
            torch.set_default_device(None)
    else:
        with refused, torch.device("meta"):
            fastgen.load(directory)
