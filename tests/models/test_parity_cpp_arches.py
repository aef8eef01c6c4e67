"""The proofs of the ``cpp`` target on every instruction set that this CPU has, not its best alone."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from fastgen.compile.build.cpp import CPP_ARCHES, can_run
from fastgen.compile.build.loader import target_of
from fastgen.compile.host.device import Device, current
from fastgen.errors import InvalidArgumentError
from tests.models.test_parity_cpp import OPTIONS, SHARED, config_of
from tests.reference import check_family
from tests.runtime import test_same_answer_cpp as same_answer

VARIABLE = "FASTGEN_CPP_ARCH"


@pytest.fixture(params=CPP_ARCHES)
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that engines are built for."""
    if not can_run(request.param, current("cpu")):
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


def test_an_instruction_set_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Device("cpu", "some", 1 << 30, instruction_sets=("avx2", "fma", "f16c"))
    monkeypatch.setenv(VARIABLE, "portable")
    assert target_of(cpu) == "portable"
    monkeypatch.setenv(VARIABLE, "avx512vnni")
    lacking = r"'avx512vnni': this CPU lacks avx512_vnni, avx512bw, avx512f; it can run avx2, portable"
    with pytest.raises(InvalidArgumentError, match=lacking):
        target_of(cpu)
    monkeypatch.setenv(VARIABLE, "sse2")
    names = "avx512bf16, avx512vnni, avx512, avx2, portable"
    with pytest.raises(InvalidArgumentError, match=f"'sse2': expected one of {names}"):
        target_of(cpu)
