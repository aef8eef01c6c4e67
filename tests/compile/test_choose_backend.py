"""Choosing a backend sets how torch accumulates, for the whole process."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from fastgen.compile.backends.choose import choose_backend, target_facts
from fastgen.compile.host.device import Device, current
from fastgen.errors import InvalidArgumentError

H200 = Device("cuda", "NVIDIA H200", 141 << 30, index=0, capability=(9, 0), num_sms=132)
SETTINGS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@pytest.fixture
def reduced_precision() -> Generator[None]:
    """Products of 16 bits may be added up in 16 bits, which torch allows by default."""
    products = torch.backends.cuda.matmul
    before = {name: getattr(products, name) for name in SETTINGS}
    for name in SETTINGS[:2]:
        setattr(products, name, True)
    yield
    for name, value in before.items():
        setattr(products, name, value)


@pytest.mark.usefixtures("reduced_precision")
@pytest.mark.parametrize("target", ["auto", "triton", "torch"])
def test_on_a_gpu_the_library_accumulates_in_fp32_whatever_the_target(target: str) -> None:
    facts = target_facts(target, H200, num_threads=None)
    choose_backend(facts, H200, token_budget=8, max_num_seqs=2, max_prompt_rows=8, num_threads=None)
    assert [getattr(torch.backends.cuda.matmul, name) for name in SETTINGS] == [False, False, False]


@pytest.mark.usefixtures("reduced_precision")
def test_on_a_cpu_that_setting_is_left_alone() -> None:
    facts, cpu = target_facts("torch", current("cpu"), num_threads=None), current("cpu")
    choose_backend(facts, cpu, token_budget=8, max_num_seqs=2, max_prompt_rows=8, num_threads=None)
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_a_target_is_one_of_four_and_cpp_runs_on_a_cpu() -> None:
    for name, device, message in (
        ("cuda", current("cpu"), "target='cuda': expected one of 'auto', 'torch', 'cpp', 'triton'"),
        ("cpp", H200, "target='cpp' runs on a CPU, and device='cuda:0' is asked for"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            target_facts(name, device, num_threads=None)
