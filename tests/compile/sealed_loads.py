"""Loads a kernel of a sealed bundle in a process of its own, where only the GPU is made up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fastgen.compile.build.triton_modules import stand_in_for_driver
from fastgen.compile.spec import KernelSpec
from tests.compile.norms import norm_spec

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"model": "tiny-llama"}


def a_norm() -> KernelSpec:
    return norm_spec("triton", "rms", 64, "bf16", 1e-5)


# Uses Triton's own driver and launcher. Only the calls that reach for the GPU are made up, since the driver's library,
# which must be there for the module to be loaded, is one that does nothing.
MADE_UP_GPU = """
import dataclasses, json, logging, sys, triton, triton.backends
from pathlib import Path
from triton.backends.nvidia.driver import CudaDriver
from fastgen.compile.build.bundle import load_bundle
from fastgen.compile.host.device import Device
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.norm.triton import norm_spec
from fastgen.compile.build.triton_worker import parse_arch

logging.basicConfig(level=logging.WARNING)
loaded = []

class Driver(CudaDriver):
    def __init__(self):
        super().__init__()
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device: 0
        self.utils.get_device_properties = lambda device: {"max_shared_mem": 227 << 10}
        self.utils.load_binary = lambda name, binary, shared, device: (loaded.append(bytes(binary)), 2, 32, 0, 1024)
        self.utils.unload_module = lambda module: None

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return parse_arch("sm_90")

triton.backends.backends["nvidia"] = dataclasses.replace(triton.backends.backends["nvidia"], driver=Driver)
h100 = Device("cuda", "NVIDIA H100", 80 << 30, index=0, capability=(9, 0), num_sms=132)
spec = norm_spec(NormShape("rms", 64, "bf16", 1e-5))
"""
SEALED = """
loader = load_bundle(sys.argv[1], h100)
kernel = loader.load(spec)
entry = loader.find(spec)
module = triton.runtime.driver.active.utils.cuOccupancyMaxActiveClusters.__self__
print(json.dumps([loaded == [entry.source.with_suffix(".cubin").read_bytes()], module.__file__]))
"""


def sealed_load(bundle: Path, directory: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Loads the bundle's norm in a process that finds no compiler, and whose driver's library does nothing."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    settings = {"PYTHONPATH": path, "PATH": str(directory / "nothing"), "FASTGEN_CACHE": str(directory / "kernels")}
    return run_beside_driver(sys.executable, before + MADE_UP_GPU + SEALED, [str(bundle)], directory, settings)


def run_beside_driver(
    python: str, script: str, arguments: list[str], directory: Path, settings: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs a script with an interpreter. Everything that Triton writes goes below ``directory``."""
    (directory / "driver").mkdir(exist_ok=True)
    stand_in_for_driver(directory / "driver")
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC", "CXX")}
    environment |= {
        "LD_LIBRARY_PATH": str(directory / "driver"),
        "TRITON_LIBCUDA_PATH": str(directory / "driver"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        **settings,
    }
    command = [python, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
