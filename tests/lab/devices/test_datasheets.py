"""Datasheets: the figures of their makers, and what is asked of them in vain."""

from __future__ import annotations

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.lab.devices.datasheets import DEVICES, GIB, datasheet


def test_the_devices_of_the_lab_are_known() -> None:
    assert set(DEVICES) == {"A100-80", "A6000", "H100", "H200", "A10G", "RTX-4090"}


@pytest.mark.parametrize("device", DEVICES.values(), ids=str)
def test_figures_are_plausible(device) -> None:
    assert 0.9 * device.memory_bytes < device.reported_bytes < device.memory_bytes * 1.07
    assert device.rates["bfloat16"] == device.rates["float16"]
    assert device.rates["float32"] < device.rates["bfloat16"] < device.rates["int8"]
    # Tokens at which products take as long as reading the weights; dense rates, so hundreds and not thousands.
    assert 80 < device.rates["bfloat16"] / device.bandwidth < 320
    assert device.device.kind == "cuda"
    assert device.target.arch == "sm_{}{}".format(*device.capability)


def test_a_name_may_be_spelled_as_people_do() -> None:
    assert datasheet("rtx 4090") is datasheet("RTX_4090") is DEVICES["RTX-4090"]


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match=r"device='B200': expected one of A100-80, .*RTX-4090"):
        datasheet("B200")


def test_a_rate_that_a_device_has_no_units_for_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="A100-80 has no rate for fp8: it has float32, bfloat16"):
        datasheet("A100-80").rate("fp8")


def test_the_fastest_link_that_connects_enough_devices_is_used() -> None:
    a6000 = datasheet("A6000")
    assert [a6000.link(count).name for count in (2, 4)] == ["NVLink", "PCIe"]
    with pytest.raises(InvalidArgumentError, match="16 A6000 have no link: at most 8 are in one machine"):
        a6000.link(16)


def test_an_all_reduce_by_hand() -> None:
    """4 devices send 1.5 times 30 MB over 300 GB/s, half of which is reached: 300 µs, and 15 µs beside."""
    link = datasheet("A100-80").link(4)
    assert link.all_reduce_s(30e6, 4, efficiency=0.5) == pytest.approx(315e-6)
    assert link.all_reduce_s(30e6, 1, efficiency=0.5) == 0


def test_gib_is_a_power_of_two() -> None:
    assert datasheet("A10G").memory_bytes == 24 * GIB
