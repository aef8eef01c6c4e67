"""Verification of generated kernels on a device: interpreted off a GPU, and of every recipe on one."""

from __future__ import annotations

import pytest

from fastgen.compile.backends.choose import kernel_targets
from fastgen.compile.host.device import Device, current
from fastgen.errors import InvalidArgumentError
from fastgen.verify import run, verify
from tests.models.test_recipes_verified import NO_REFERENCE
from tests.shuffled import shipped_texts

H200 = Device("cuda", "NVIDIA H200", 141 << 30, index=0, capability=(9, 0), num_sms=132)


def test_a_gpu_runs_triton_kernels_and_a_cpu_those_in_cpp() -> None:
    assert kernel_targets(H200) == ("triton",)
    assert kernel_targets(current("cpu")) == ("cpp",)


def test_a_device_that_is_not_there_is_refused_before_anything_is_drawn() -> None:
    with pytest.raises(InvalidArgumentError, match="device='cuda:99': "):
        verify("llama", device="cuda:99")


@pytest.mark.slow
def test_triton_kernels_are_compared_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Device] = []

    def targets(device: Device) -> tuple[str, ...]:
        asked.append(device)
        return ("triton",)

    monkeypatch.setattr(run, "kernel_targets", targets)
    report = verify("llama", configs=1)
    assert report.passed, report.finding
    assert [device.kind for device in asked] == ["cpu"]
    assert report.checks["kernels"].num_compared == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(shipped_texts().keys() - NO_REFERENCE))
def test_every_recipe_on_a_gpu(name: str) -> None:
    report = verify(name, configs=1, device="cuda")
    assert report.passed, report.finding
