"""Engines that cannot fit are refused with the arithmetic, and one that follows the advice fits."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.host.device import Device
from fastgen.errors import OutOfMemoryError
from fastgen.models.measure import ModelBuild
from fastgen.options import LoadOptions
from fastgen.runtime.config import resolve_engine_config
from fastgen.runtime.memory.fit import default_num_blocks, least_bytes, nearest_that_fits
from fastgen.runtime.memory.ledger import MemoryModel
from fastgen.runtime.memory.sizes import AskedSizes, EngineConfig
from tests.draws import drawn
from tests.runtime.test_engine_config import make_spec

MIB = 1 << 20
SPEC, LONG_SPEC, ENDLESS_SPEC = make_spec(), make_spec(40_000), make_spec(None)
TARGETS = {
    "cpu": [TargetFacts("cpp", "avx512", 4), TargetFacts()],
    "cuda": [TargetFacts("triton", "sm_80", num_sms=108)],
}

# A model is measured once, on whatever devices it is to fit.
MEASURED: dict[ModelBuild, MemoryModel] = {}


def memory_of(size_bytes: int, spec: Any = SPEC, kind: Any = "cpu", target: TargetFacts | None = None) -> MemoryModel:
    device = Device(kind=kind, name="test", memory_bytes=size_bytes)
    build = ModelBuild(spec, torch.float32, target or TARGETS[kind][0])
    if build not in MEASURED:
        MEASURED[build] = MemoryModel(build, device)
    return MEASURED[build].on(device)


def refusal(memory: MemoryModel, **asked: Any) -> str:
    with pytest.raises(OutOfMemoryError) as caught:
        resolve_engine_config(memory, LoadOptions("a model", **asked))
    return str(caught.value)


def advised(message: str) -> list[dict[str, int]]:
    """The changes that a refusal offers, each enough by itself."""
    advice = message.rpartition("; ")[2]
    offers = advice.removeprefix("it fits with ").split(", or with ")
    return [{name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", offer)} for offer in offers]


def test_the_arithmetic_adds_up_and_names_what_it_is_of() -> None:
    message = refusal(memory_of(100 * MIB), kv_cache_memory="3GiB", token_budget=700)
    terms, total, has = re.fullmatch(r"(.*) = ([\d.]+) GiB, but cpu has ([\d.]+ MiB); .*", message).groups()
    assert "activations of token_budget=700 " in terms
    assert "KV cache 3.00 GiB" in terms
    sizes = [float(size) / (1 if unit == "G" else 1024) for size, unit in re.findall(r"([\d.]+) ([GM])iB", terms)]
    assert len(sizes) == terms.count(" + ") + 1
    assert sum(sizes) == pytest.approx(float(total), abs=0.005 * len(sizes))
    assert has == "100 MiB"


def test_the_nearest_is_the_nearest() -> None:
    memory = memory_of(100 * MIB)
    (offer,) = advised(refusal(memory, kv_cache_memory="200MiB"))
    resolve_engine_config(memory, LoadOptions("a model", **offer))
    block_bytes = memory.block_bytes(16)
    with pytest.raises(OutOfMemoryError):
        resolve_engine_config(memory, LoadOptions("a model", kv_cache_memory=offer["kv_cache_memory"] + block_bytes))
    offers = advised(refusal(memory, token_budget=10**6, max_num_seqs=10))
    (budget,) = [offer["token_budget"] for offer in offers if "token_budget" in offer]
    resolve_engine_config(memory, LoadOptions("a model", token_budget=budget, max_num_seqs=10))
    with pytest.raises(OutOfMemoryError):
        resolve_engine_config(memory, LoadOptions("a model", token_budget=budget + 1, max_num_seqs=10))


def test_a_budget_is_not_lowered_below_the_sequences() -> None:
    offers = advised(refusal(memory_of(100 * MIB), token_budget=10**9, max_num_seqs=10**9))
    assert offers
    for offer in offers:
        assert offer["max_num_seqs"] <= offer["token_budget"]


def test_no_advice_is_a_length_without_room_for_an_answer() -> None:
    memory = memory_of(400 * MIB)
    sizes = {"block_size": 1, "max_num_seqs": 1, "token_budget": 8, "max_model_len": 50, "kv_reservation": "context"}
    message = refusal(memory, kv_cache_memory=2 * memory.block_bytes(1), **sizes)
    assert not re.search(r"max_model_len=1\b", message)


def test_where_no_size_alone_is_enough_all_are_lowered() -> None:
    memory = memory_of(64 * MIB, LONG_SPEC)
    message = refusal(memory, kv_cache_memory="1GiB", token_budget=10**6, max_num_seqs=10**5)
    (offer,) = advised(message)
    assert set(offer) >= {"kv_cache_memory", "token_budget", "max_num_seqs", "max_model_len"}
    resolve_engine_config(memory, LoadOptions("a model", **offer))


def test_where_the_weights_are_too_large_something_smaller_is_named() -> None:
    spec = make_spec()
    weights = MemoryModel(ModelBuild(spec, torch.float32, TARGETS["cpu"][0]), memory_of(1 << 40).device)
    least = weights.ledger(
        resolve_engine_config(weights, LoadOptions("a model", token_budget=1, max_num_seqs=1, max_model_len=2))
    )
    message = refusal(memory_of(MIB, kind="cuda"))
    assert re.search(r"no sizes of the engine help: it takes [\d.]+ MiB at least", message)
    assert least.total_bytes > MIB


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_least_memory_that_is_named_is_just_enough(kind: str) -> None:
    """Compiled formats have a share of it, which a larger memory would not tell."""
    config = resolve_engine_config(
        memory_of(1 << 40, kind=kind), LoadOptions("a model", token_budget=1, max_num_seqs=1, max_model_len=2)
    )
    least = least_bytes(memory_of(MIB, kind=kind), config)
    assert memory_of(least, kind=kind).ledger(config).total_bytes == least
    for less in (least - 1, least - (least >> 7), least // 2):
        assert memory_of(less, kind=kind).ledger(config).total_bytes > less


def test_where_only_smaller_weights_help_their_formats_are_named() -> None:
    memory = memory_of(100 * MIB)
    asked = AskedSizes(kv_cache_memory=MIB, token_budget=8, max_num_seqs=4, max_model_len=64, block_size=16)

    def resolve(tried: MemoryModel, sizes: AskedSizes) -> Any:
        if tried.build.weight_format not in ("int4", "int8"):
            raise OutOfMemoryError("the weights are too large")

    advice = nearest_that_fits(memory, asked, asked, resolve)
    assert advice in (
        "no sizes of the engine help, but it fits with quantize='int8', or with quantize='int4'",
        "no sizes of the engine help, but it fits with quantize='int4', or with quantize='int8'",
    )


class Figures:
    """A memory model of round figures: an engine takes 1000 bytes, and 100 for each block."""

    num_kv_groups = 2

    def __init__(self, kind: Any, memory_bytes: int) -> None:
        self.device = Device(kind=kind, name="test", memory_bytes=memory_bytes)

    def block_bytes(self, block_size: int) -> int:
        assert block_size == 16
        return 100

    def ledger(self, num_blocks: int) -> Any:
        sizes = {"KV cache": 100 * num_blocks}
        return SimpleNamespace(total_bytes=1000 + 100 * num_blocks, size_bytes=sizes.__getitem__)


class Sized(int):
    """Stands for the sizes of an engine with so many blocks."""

    block_size = 16


@pytest.mark.parametrize(
    ("kind", "memory_bytes", "useful", "expected"),
    [
        ("cpu", 3000, None, 10),  # half of the 2000 bytes that are left
        ("cpu", 2999, None, 9),
        ("cpu", 3000, 9, 9),
        ("cpu", 3000, 10, 10),
        ("cpu", 3000, 11, 10),
        ("cpu", 3000, 30, 10),
        ("cpu", 3000, 99, 10),
        ("cpu", 1100, None, 0),
        ("cuda", 3000, None, 17),  # 2700 bytes in all
        ("cuda", 2999, None, 16),
        ("cuda", 3000, 17, 17),
        ("cuda", 3000, 18, 17),
    ],
)
def test_a_cache_has_its_share_of_the_memory_and_no_more_than_is_useful(
    kind: str, memory_bytes: int, useful: int | None, expected: int
) -> None:
    memory = cast(Any, Figures(kind, memory_bytes))
    assert default_num_blocks(memory, cast(Any, Sized), useful) == expected


FULL = AskedSizes(kv_cache_memory=5000, token_budget=100, max_num_seqs=20, max_model_len=50, block_size=16)


@pytest.mark.parametrize(
    ("limit", "kv_cache_memory", "advice"),
    [
        # 6150 bytes are asked for.
        (
            6149,
            5000,
            "kv_cache_memory=4900, or with token_budget=99, or with max_num_seqs=19, or with max_model_len=49",
        ),
        (6060, 5000, "kv_cache_memory=4900, or with token_budget=91, or with max_num_seqs=2"),
        (6000, 5000, "kv_cache_memory=4800, or with token_budget=85"),
        (5200, 5000, "kv_cache_memory=4000, or with token_budget=10 and max_num_seqs=10"),
        (5150, 5000, "kv_cache_memory=4000, or with token_budget=6 and max_num_seqs=6"),
        (9000, 299, "kv_cache_memory=300"),  # three blocks are the least
        (1450, 5000, "kv_cache_memory=300"),
        # With 300 bytes for the cache 100 are left. At 102 of 1024 parts the other sizes take 99.
        (400, 5000, "kv_cache_memory=300, token_budget=9, max_num_seqs=1, max_model_len=4 and block_size=1"),
    ],
)
def test_advice_is_the_nearest_of_each_size_or_all_lowered_alike(limit: int, kv_cache_memory: int, advice: str) -> None:
    """Here a token of the budget takes 10 bytes, a sequence 5 and a position 1."""

    def resolve(memory: MemoryModel, asked: AskedSizes) -> EngineConfig:
        kv_bytes, budget, num_seqs, length = (
            asked.kv_cache_memory or 0, asked.token_budget or 0, asked.max_num_seqs or 0, asked.max_model_len or 0,
        )  # fmt: skip
        assert budget >= num_seqs
        if kv_bytes < 300 or kv_bytes + 10 * budget + 5 * num_seqs + length > limit:
            raise OutOfMemoryError("too large")
        return cast(Any, None)

    asked = replace(FULL, kv_cache_memory=kv_cache_memory)
    assert nearest_that_fits(cast(Any, Figures("cpu", 0)), asked, asked, resolve) == f"it fits with {advice}"


@pytest.mark.slow
@drawn(100, in_short=30)
@given(
    size=st.integers(5 * MIB, 400 * MIB),
    kind=st.sampled_from(["cpu", "cuda"]),
    which=st.integers(0, 1),
    spec=st.sampled_from([SPEC, LONG_SPEC, ENDLESS_SPEC]),
    kv_cache_memory=st.none() | st.integers(1, 10**9),
    token_budget=st.none() | st.integers(1, 10**6),
    max_num_seqs=st.none() | st.integers(1, 10**5),
    block_size=st.none() | st.sampled_from([8, 64, 4096]),
)
def test_every_advice_can_be_followed(size: int, kind: Any, which: int, spec: Any, **asked: Any) -> None:
    asked = {name: value for name, value in asked.items() if value is not None}
    budget, num_seqs = asked.get("token_budget"), asked.get("max_num_seqs")
    if num_seqs is not None and num_seqs > (budget or (512 if kind == "cpu" else 2048)):
        return
    memory = memory_of(size, spec, kind, TARGETS[kind][which % len(TARGETS[kind])])
    try:
        config = resolve_engine_config(memory, LoadOptions("a model", **asked))
    except OutOfMemoryError as error:
        message = str(error)
    else:
        assert memory.ledger(config).total_bytes <= size
        return
    if "no sizes of the engine help" in message:
        return
    for offer in advised(message):
        config = resolve_engine_config(memory, LoadOptions("a model", **asked | offer))
        assert memory.ledger(config).total_bytes <= size
