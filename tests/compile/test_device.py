"""The description of the device, against machines that are not this one."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest
import torch

from fastgen.compile.host import device, system
from fastgen.errors import InvalidArgumentError

# Two packages of two cores, each core with two threads; what a hypervisor or an ARM board adds stands apart.
INTEL = "\n".join(
    f"processor\t: {processor}\nmodel name\t: Some Xeon\nphysical id\t: {package}\ncore id\t\t: {core}\n"
    "flags\t\t: fpu sse avx2 fma avx512f amx_tile\n"
    for processor, (package, core) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)] * 2)
)
ARM = "".join(f"processor\t: {n}\nFeatures\t: fp asimd i8mm sve\n\n" for n in range(4)) + "Hardware\t: Board: one\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty machine of eight logical processors: cpuinfo and the control group's files are what the test writes."""
    monkeypatch.setattr(device, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(system, "_CGROUP", tmp_path)
    monkeypatch.setattr(device, "_allowed_cpus", lambda: set(range(8)))
    return tmp_path


def test_hyper_threads_are_not_cores(machine: Path) -> None:
    (machine / "cpuinfo").write_text(INTEL)
    cpu = device.current("cpu")
    assert (cpu.kind, cpu.name, cpu.num_cores) == ("cpu", "Some Xeon", 4)
    assert cpu.instruction_sets == ("avx2", "fma", "avx512f", "amx_tile")
    assert cpu.torch_device == torch.device("cpu")
    assert str(cpu) == "cpu"


def test_a_matrix_unit_counts_only_with_the_permission_of_the_system(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (machine / "cpuinfo").write_text(INTEL.replace("amx_tile", "amx_bf16 amx_tile amx_int8"))
    asked = []

    class System:
        answer = 0

        def syscall(self, *numbers: int) -> int:
            asked.append(numbers)
            ctypes.set_errno(errno.ENOSPC)
            return self.answer

    monkeypatch.setattr(device.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(device.ctypes, "CDLL", lambda *_args, **_options: System())
    for System.answer, sets, refusal in (
        (0, ("avx2", "fma", "avx512f", "amx_tile", "amx_bf16", "amx_int8"), ""),
        (-1, ("avx2", "fma", "avx512f"), "the system refused the matrix unit: No space left on device"),
    ):
        device._amx_refusal.cache_clear()
        for _ in range(2):
            cpu = device.current("cpu")
            assert (cpu.instruction_sets, cpu.amx_refusal) == (sets, refusal)
    device._amx_refusal.cache_clear()
    assert asked == [(158, 0x1023, 18)] * 2  # once for each answer
    assert [record.message for record in caplog.records] == [
        "the CPU has a matrix unit (AMX), but the system does not let this process use it: No space left on device"
    ]


def test_only_the_cores_this_process_may_use_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "cpuinfo").write_text(INTEL)
    monkeypatch.setattr(device, "_allowed_cpus", lambda: {1, 2, 5})  # 1 and 5 are threads of one core
    assert device.current("cpu").num_cores == 2


def test_without_a_topology_each_processor_is_a_core(machine: Path) -> None:
    (machine / "cpuinfo").write_text(ARM)
    cpu = device.current("cpu")
    assert cpu.num_cores == 4
    assert cpu.instruction_sets == ("asimd", "i8mm", "sve")


def test_without_cpuinfo_the_system_is_queried(machine: Path) -> None:
    cpu = device.current("cpu")
    assert cpu.num_cores == 8
    assert cpu.name
    assert cpu.instruction_sets == ()


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 4), ("150000 100000", 2), ("100 100000", 1), ("900000 100000", 4)]
)
def test_a_container_quota_bounds_the_cores(machine: Path, quota: str, cores: int) -> None:
    (machine / "cpuinfo").write_text(INTEL)
    (machine / "cpu.max").write_text(quota + "\n")
    assert device.current("cpu").num_cores == cores


def test_a_container_limit_bounds_the_memory(machine: Path) -> None:
    installed = device.current("cpu").memory_bytes
    assert installed > 1 << 28
    (machine / "memory.max").write_text("max\n")
    assert device.current("cpu").memory_bytes == installed
    (machine / "memory.max").write_text(f"{1 << 28}\n")
    assert device.current("cpu").memory_bytes == 1 << 28


def test_free_memory_is_what_the_system_and_the_container_leave(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = device.current("cpu")
    monkeypatch.setattr(device, "_MEMORY_INFO", machine / "meminfo")
    assert device.free_memory_bytes(cpu) is None
    (machine / "meminfo").write_text("MemTotal:  2097152 kB\nMemFree:   1 kB\nMemAvailable:   1048576 kB\n")
    assert device.free_memory_bytes(cpu) == 1 << 30
    (machine / "memory.current").write_text(f"{200 << 20}\n")
    (machine / "memory.max").write_text("max\n")
    assert device.free_memory_bytes(cpu) == 1 << 30
    (machine / "memory.max").write_text(f"{256 << 20}\n")
    assert device.free_memory_bytes(cpu) == 56 << 20
    (machine / "memory.stat").write_text(f"anon 1\ninactive_file {10 << 20}\nactive_file 7\n")
    assert device.free_memory_bytes(cpu) == 66 << 20


def test_limits_of_the_first_version_of_control_groups_count_too(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "cpuinfo").write_text(INTEL)
    (machine / "meminfo").write_text("MemAvailable:   1048576 kB\n")
    monkeypatch.setattr(device, "_MEMORY_INFO", machine / "meminfo")
    for folder in ("cpu", "memory"):
        (machine / folder).mkdir()
    (machine / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (machine / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (machine / "memory" / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    (machine / "memory" / "memory.usage_in_bytes").write_text(f"{200 << 20}\n")
    (machine / "memory" / "memory.stat").write_text(f"cache 1\ninactive_file {10 << 20}\ntotal_inactive_file 1\n")
    unlimited = device.current("cpu")
    assert unlimited.num_cores == 4
    assert device.free_memory_bytes(unlimited) == 1 << 30
    (machine / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (machine / "memory" / "memory.limit_in_bytes").write_text(f"{256 << 20}\n")
    limited = device.current("cpu")
    assert (limited.num_cores, limited.memory_bytes) == (2, 256 << 20)
    assert device.free_memory_bytes(limited) == 66 << 20


@pytest.mark.parametrize("name", ["", "gpu", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cpu\n", "cuda:99999999", 0])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"device=.*: expected 'auto', 'cpu', 'cuda'"):
        device.current(name)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(InvalidArgumentError, match=r"device='cuda': this torch \(.*\) is built without GPU support"):
        device.current("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidArgumentError, match=r"device='cuda:2': this machine shows 2 GPUs"):
        device.current("cuda:2")


def test_a_gpu_is_described_and_auto_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor, multi_processor_count = "Some GPU", 80 << 30, 9, 0, 132

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    for asked, index in {"auto": 0, "cuda": 0, "cuda:1": 1}.items():
        gpu = device.current(asked)
        assert gpu.torch_device == torch.device("cuda", index)
        assert (gpu.kind, gpu.name, gpu.memory_bytes, gpu.capability, gpu.num_sms) == (
            "cuda",
            "Some GPU",
            80 << 30,
            (9, 0),
            132,
        )
    assert device.current("cpu").kind == "cpu"
