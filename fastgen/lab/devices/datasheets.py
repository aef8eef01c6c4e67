"""Figures that the makers of devices publish: memory, bandwidth, rates of matrix products, and links.

All rates are dense: NVIDIA's datasheets print twice as much for sparse matrices. A link's bandwidth is that of one
direction: datasheets print the sum of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from fastgen.compile.backends.choose import target_facts
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.host.device import Device, current
from fastgen.errors import InvalidArgumentError

GB: Final = 10**9
GIB: Final = 2**30
TERA: Final = 10**12

RateName = Literal["float32", "bfloat16", "float16", "fp8", "int8"]

# Seconds that an all-reduce takes beside the transfer itself, at the sizes of decodes; nccl-tests print 10 to 30 µs for
# a few KiB within one machine. Without access to each other's memory, devices take another copy through the host's.
_NVLINK_LATENCY_S = 15e-6
_PCIE_LATENCY_S = 30e-6


@dataclass(frozen=True)
class Link:
    """A connection between the devices of one machine."""

    name: str
    # Bytes a second in one direction, from each device.
    bandwidth: float
    latency_s: float
    # Devices that it connects.
    most_devices: int = 8

    def all_reduce_s(self, num_bytes: float, num_devices: int, efficiency: float) -> float:
        """Returns the time of summing ``num_bytes`` over the devices, by a ring: each device sends every byte
        ``2 (n - 1) / n`` times (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009)."""
        if num_devices == 1:
            return 0.0
        sent = 2 * (num_devices - 1) / num_devices * num_bytes
        return self.latency_s + sent / (self.bandwidth * efficiency)


@dataclass(frozen=True)
class Datasheet:
    """One kind of device. Memory is in bytes, bandwidth in bytes a second, rates are operations a second."""

    name: str
    # The memory that is sold, and the part of it that CUDA reports as a device's total.
    memory_bytes: int
    reported_bytes: int
    bandwidth: float
    rates: Mapping[RateName, float]
    # From the fastest to the slowest; the first that connects enough devices is used.
    links: tuple[Link, ...]
    # CUDA's compute capability, and multiprocessors: kernels' workspaces depend on them.
    capability: tuple[int, int]
    num_sms: int
    # The device itself, where it is that of this machine and has no datasheet.
    here: Device | None = None

    def rate(self, dtype: str) -> float:
        """Returns the operations a second of matrix products in ``dtype``.

        :raises InvalidArgumentError: if the device has no units for it.
        """
        found = {str(name): rate for name, rate in self.rates.items()}.get(dtype)
        if not self.rates:
            raise InvalidArgumentError(
                f"{self.name} has no datasheet: measure what its steps cost by `fastgen calibrate`, and give the file "
                "as --calibration"
            )
        if found is None:
            raise InvalidArgumentError(f"{self.name} has no rate for {dtype}: it has {', '.join(self.rates)}")
        return found

    def link(self, num_devices: int) -> Link:
        """Returns the fastest link that connects so many devices.

        :raises InvalidArgumentError: if none does.
        """
        for link in self.links:
            if num_devices <= link.most_devices:
                return link
        raise InvalidArgumentError(
            f"{num_devices} {self.name} have no link: at most {self.most_linked} are in one machine"
        )

    @property
    def most_linked(self) -> int:
        """Returns how many of the devices can share a model."""
        return max((link.most_devices for link in self.links), default=1)

    @property
    def device(self) -> Device:
        """Returns the device as the engine describes one, with the memory that CUDA reports."""
        return self.here or Device(
            kind="cuda",
            name=self.name,
            memory_bytes=self.reported_bytes,
            capability=self.capability,
            num_sms=self.num_sms,
        )

    @property
    def target(self) -> TargetFacts:
        """Returns the facts of the target that runs on it."""
        if self.here is not None:
            return target_facts("auto", self.here, num_threads=None)
        return TargetFacts("triton", "sm_{}{}".format(*self.capability), num_sms=self.num_sms)


def _pcie(bandwidth: float, *, shares_memory: bool) -> Link:
    """Returns PCI Express. Devices that cannot reach each other's memory send every byte through the host's, so half
    of the bandwidth is left."""
    if shares_memory:
        return Link("PCIe", bandwidth, _PCIE_LATENCY_S)
    return Link("PCIe through the host's memory", bandwidth / 2, 2 * _PCIE_LATENCY_S)


# Memory that CUDA reports: ``total_memory`` of torch's device properties, as its messages of exhausted memory print it.

# NVIDIA H100 Tensor Core GPU datasheet, column "H100 SXM": 80 GB, 3.35 TB/s; 1,979 TFLOPS in bf16 and fp16 and
# 3,958 in fp8 and int8, all sparse; 67 TFLOPS in fp32; NVLink 900 GB/s. 132 multiprocessors: H100 whitepaper.
_H100: Final = Datasheet(
    name="H100",
    memory_bytes=80 * GIB,
    reported_bytes=int(79.18 * GIB),
    bandwidth=3350 * GB,
    rates={
        "float32": 66.9 * TERA,
        "bfloat16": 989.4 * TERA,
        "float16": 989.4 * TERA,
        "fp8": 1978.9 * TERA,
        "int8": 1978.9 * TERA,
    },
    links=(Link("NVLink", 450 * GB, _NVLINK_LATENCY_S),),
    capability=(9, 0),
    num_sms=132,
)

_ALL: Final = (
    # NVIDIA A100 Tensor Core GPU datasheet (2021), column "A100 80GB SXM": 2,039 GB/s; 312 TFLOPS in bf16 and fp16, 624
    # TOPS in int8, 19.5 TFLOPS in fp32; NVLink 600 GB/s. 108 multiprocessors: A100 architecture whitepaper, table 4.
    Datasheet(
        name="A100-80",
        memory_bytes=80 * GIB,
        reported_bytes=int(79.15 * GIB),
        bandwidth=2039 * GB,
        rates={"float32": 19.5 * TERA, "bfloat16": 312 * TERA, "float16": 312 * TERA, "int8": 624 * TERA},
        links=(Link("NVLink", 300 * GB, _NVLINK_LATENCY_S),),
        capability=(8, 0),
        num_sms=108,
    ),
    # NVIDIA RTX A6000 datasheet (2021): 48 GB, 768 GB/s, 38.7 TFLOPS in fp32, 309.7 "tensor", which is sparse; NVLink
    # 112.5 GB/s between two; PCIe 4.0 x16. Dense 154.8 in bf16 and fp16, 309.7 in int8, 84 multiprocessors: NVIDIA
    # Ampere GA102 whitepaper, appendix.
    Datasheet(
        name="A6000",
        memory_bytes=48 * GIB,
        reported_bytes=int(47.54 * GIB),
        bandwidth=768 * GB,
        rates={"float32": 38.7 * TERA, "bfloat16": 154.8 * TERA, "float16": 154.8 * TERA, "int8": 309.7 * TERA},
        links=(
            Link("NVLink", 56.25 * GB, _NVLINK_LATENCY_S, most_devices=2),
            _pcie(32 * GB, shares_memory=True),
        ),
        capability=(8, 6),
        num_sms=84,
    ),
    _H100,
    # NVIDIA H200 Tensor Core GPU datasheet, column "H200 SXM": 141 GB, 4.8 TB/s; rates and links of the H100.
    replace(_H100, name="H200", memory_bytes=141 * GB, reported_bytes=int(139.81 * GIB), bandwidth=4800 * GB),
    # NVIDIA A10G datasheet (AWS, 2022): 24 GB, 600 GB/s, 35 TFLOPS in fp32, 70 | 140 (sparse) in bf16 and fp16, 140 |
    # 280 in int8; PCIe 4.0 x16. 80 multiprocessors. In AWS's g5 machines they cannot reach each other's memory.
    Datasheet(
        name="A10G",
        memory_bytes=24 * GIB,
        reported_bytes=int(22.06 * GIB),
        bandwidth=600 * GB,
        rates={"float32": 35 * TERA, "bfloat16": 70 * TERA, "float16": 70 * TERA, "int8": 140 * TERA},
        links=(_pcie(32 * GB, shares_memory=False),),
        capability=(8, 6),
        num_sms=80,
    ),
    # NVIDIA Ada GPU architecture whitepaper, appendix A, GeForce RTX 4090: 24 GB, 1,008 GB/s, 82.6 TFLOPS in fp32;
    # 165.2 in bf16 and fp16 and 330.3 in fp8, with sums in fp32; 660.6 TOPS in int8; 128 multiprocessors; PCIe 4.0 x16,
    # no NVLink. GeForce drivers give no access to another device's memory.
    Datasheet(
        name="RTX-4090",
        memory_bytes=24 * GIB,
        reported_bytes=int(23.65 * GIB),
        bandwidth=1008 * GB,
        rates={
            "float32": 82.6 * TERA,
            "bfloat16": 165.2 * TERA,
            "float16": 165.2 * TERA,
            "fp8": 330.3 * TERA,
            "int8": 660.6 * TERA,
        },
        links=(_pcie(32 * GB, shares_memory=False),),
        capability=(8, 9),
        num_sms=128,
    ),
)

# By name; upper case, with hyphens.
DEVICES: Final[Mapping[str, Datasheet]] = {each.name: each for each in _ALL}


def this_machine() -> Datasheet:
    """Returns the CPU of this machine: its memory, and no rates. What steps cost here is measured."""
    here = current("cpu")
    return Datasheet(
        name="cpu",
        memory_bytes=here.memory_bytes,
        reported_bytes=here.memory_bytes,
        bandwidth=0.0,
        rates={},
        links=(),
        capability=(0, 0),
        num_sms=0,
        here=here,
    )


def datasheet(name: str) -> Datasheet:
    """Returns the datasheet of a device, or of this machine's ``cpu``; case, spaces and underscores do not matter.

    :raises InvalidArgumentError: with the names that are known.
    """
    wanted = name.strip().upper().replace(" ", "-").replace("_", "-")
    if wanted == "CPU":
        return this_machine()
    found = DEVICES.get(wanted)
    if found is None:
        raise InvalidArgumentError(f"device={name!r}: expected one of {', '.join(DEVICES)}, or cpu for this machine")
    return found
