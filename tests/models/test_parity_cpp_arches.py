"""The proofs of the ``cpp`` target on every instruction set that this CPU has, not its best alone."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from fastgen.compile.build.cpp import CPP_ARCHES
from fastgen.compile.build.loader import target_of
from fastgen.compile.host.device import Device, current
from fastgen.errors import InvalidArgumentError
from tests.compile.arches import ARCHES, EMULATED
from tests.models.test_parity_cpp import OPTIONS, SHARED, config_of
from tests.reference import check_family
from tests.runtime import test_ledger
from tests.runtime import test_same_answer_cpp as same_answer

VARIABLE = "FASTGEN_CPP_ARCH"


@pytest.fixture(params=CPP_ARCHES)
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that engines are built for."""
    if request.param not in ARCHES:
        pytest.skip(f"this CPU cannot run {request.param}")
    monkeypatch.setenv(VARIABLE, request.param)
    assert target_of(current("cpu")) == request.param
    return str(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "phi", "qwen3_moe", "deepseek_v3"])
def test_family(name: str, arch: str) -> None:
    config, model_class, attention = config_of(name, Random(f"{name} {arch}"), SHARED)
    check_family(config, model_class, OPTIONS, 0, attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "weights"), sorted(same_answer.FAST))
def test_the_same_bits(family: str, weights: str, arch: str, tmp_path: Path) -> None:
    same_answer.test_the_same_bits(family, weights, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("emulated", EMULATED)
@pytest.mark.parametrize(
    ("family", "weights"),
    [("Qwen3Moe", "int4"), ("Qwen3", "bf16"), ("Gemma2", "bf16"), ("Qwen3Moe", "bf16"), ("DeepseekV3", "bf16")],
)
def test_the_same_bits_with_an_emulated_unit(
    family: str, weights: str, emulated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, emulated)
    same_answer.test_the_same_bits(family, weights, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("emulated", EMULATED)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_matrix_unit_multiplies_bytes_with_the_bits_of_vectors(
    weights: str, emulated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, order = same_answer.checkpoint("Qwen3Moe", tmp_path), list(range(same_answer.NUM_REQUESTS))
    expected = same_answer.generate(directory, weights, order)
    monkeypatch.setenv(VARIABLE, emulated)
    found = same_answer.generate(directory, weights, order)
    same_answer.assert_same_bits(expected, found, f"{weights} on {emulated}")


@pytest.mark.slow
@pytest.mark.parametrize("emulated", EMULATED)
def test_a_matrix_unit_differs_by_less_than_rounding_to_bf16_does(
    emulated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distributions of a prompt, in bf16 by vectors and by the unit, beside those in fp32."""
    directory, order = same_answer.checkpoint("Qwen3", tmp_path), list(range(same_answer.NUM_REQUESTS))

    def distributions(weights: str) -> torch.Tensor:
        outputs = same_answer.generate(directory, weights, order)
        rows = [row for output in outputs for row in output.prompt_logprobs or [] if row is not None]
        return torch.tensor([[row[token] for token in range(same_answer.VOCAB_SIZE)] for row in rows])

    exact, by_vectors = distributions("fp32"), distributions("bf16")
    monkeypatch.setenv(VARIABLE, emulated)
    by_unit = distributions("bf16")
    rounding = (by_vectors - exact).square().mean().sqrt()
    assert 0 < (by_unit - by_vectors).square().mean().sqrt() < rounding
    assert (by_unit - exact).square().mean().sqrt() < 1.2 * rounding


@pytest.mark.slow
@pytest.mark.parametrize("emulated", EMULATED)
@pytest.mark.parametrize("build", ["cpp bf16", "cpp int8", "cpp int4"])
def test_the_ledger_of_a_matrix_unit(
    build: str, emulated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, emulated)
    for family in ("Qwen3", "Qwen3Moe"):
        (directory := tmp_path / family).mkdir()
        made = same_answer.checkpoint(family, directory)
        test_ledger.test_every_part_is_what_the_engine_holds({family: made}.__getitem__, family, build)


def test_an_instruction_set_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Device("cpu", "some", 1 << 30, instruction_sets=("avx2", "fma", "f16c"))
    monkeypatch.setenv(VARIABLE, "portable")
    assert target_of(cpu) == "portable"
    monkeypatch.setenv(VARIABLE, "avx512vnni")
    lacking = r"'avx512vnni': this CPU lacks avx512_vnni, avx512bw, avx512f; it can run avx2, portable"
    with pytest.raises(InvalidArgumentError, match=lacking):
        target_of(cpu)
    monkeypatch.setenv(VARIABLE, "sse2")
    names = "amx, avx512bf16, avx512vnni, avx512, avx2, portable"
    with pytest.raises(InvalidArgumentError, match=f"'sse2': expected one of {names}"):
        target_of(cpu)
