"""Tests of Triton kernels with `--device cuda`: only these are kept, and each launch is checked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.builder import BuiltKernel
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.triton import TritonBuilder
from tests import kernel_device
from tests.compile.norms import norm_kernel, norm_spec
from tests.kernel_device import CopyingKernel, CopyingLoader

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SPEC = norm_spec("triton", "rms", 64, "fp32", 1e-5)


class Fake(BuiltKernel):
    def __init__(self, run: Callable[..., None]):
        super().__init__(SPEC, Path())
        self._run = run

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        self._run(*arguments)


def launch(run: Callable[..., None]) -> Tensor:
    """Runs a made-up norm on copies of a tensor's second and third row. Returns what becomes of the tensor."""
    x, out = torch.ones(4, 64), torch.zeros(4, 64)
    CopyingKernel(Fake(run), CPU)((2,), x[1:3], torch.ones(64), out[1:3])
    assert torch.equal(x, torch.ones(4, 64))
    return out


def test_results_come_back_to_the_tensors_of_the_test() -> None:
    def double(x: Tensor, weight: Tensor, out: Tensor) -> None:
        assert not out.any()  # as before the first run
        out.copy_(2 * x)

    assert launch(double).tolist() == [[0.0] * 64, [2.0] * 64, [2.0] * 64, [0.0] * 64]


def test_what_is_written_beside_an_argument_is_found() -> None:
    def write_too_far(x: Tensor, weight: Tensor, out: Tensor) -> None:
        out.as_strided((1,), (1,), 64 * 3 + out.storage_offset()).fill_(5.0)

    with pytest.raises(AssertionError, match="wrote outside the memory of its arguments"):
        launch(write_too_far)


def test_an_answer_that_changes_is_found() -> None:
    runs: list[int] = []

    def race(x: Tensor, weight: Tensor, out: Tensor) -> None:
        runs.append(1)
        out.fill_(float(len(runs) == kernel_device.REPEATS - 1))

    with pytest.raises(AssertionError, match=f"gave other bits in run {kernel_device.REPEATS - 1} than in the first"):
        launch(race)


def test_a_real_kernel_computes_the_same_on_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_device, "REPEATS", 2)
    cache = KernelCache(tmp_path)
    x, weight = torch.randn(3, 64), torch.rand(64)
    found = []
    for loader in (CopyingLoader(TritonBuilder("interpret"), CPU, cache), kernel_device.triton_loader(tmp_path)):
        out = torch.full((4, 64), torch.nan)
        norm_kernel(loader.load(SPEC))(x, weight, None, out[:3])
        found.append(out)
    assert found[0][3].isnan().all()
    assert torch.equal(found[0][:3], found[1][:3])


@pytest.mark.slow  # collects in a process of its own
def test_on_a_gpu_only_tests_of_kernels_are_kept() -> None:
    """Collecting needs no GPU."""
    files = ["tests/compile/test_triton_attention.py", "tests/compile/test_triton_qkv.py", "tests/compile/test_spec.py"]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--device", "cuda", "-m", "not slow", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {line.rpartition("::")[2].partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert names >= {
        "test_feature_pairs",
        "test_every_feature_in_bf16",
        "test_latent_kv",
        "test_heads_in_several_tiles",
    }
    assert not names & {"test_every_default_on_every_target", "test_built_without_spills", "test_reference_with_sinks"}
    assert "test_spec.py" not in done.stdout


@pytest.mark.parametrize(
    "before",
    [
        "import sys; sys.modules['hypothesis'] = None",
        "from hypothesis.internal.conjecture import providers; del providers.Constants",
    ],
    ids=["no hypothesis", "an older one"],
)
def test_the_settings_of_tests_need_no_certain_hypothesis(before: str) -> None:
    command = [sys.executable, "-c", f"{before}\nimport tests.conftest"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_device_is_known_before_the_folders_on_the_command_line_are_read(tmp_path: Path) -> None:
    """Their conftest files import Triton and the loader of kernels."""
    (tmp_path / "said.py").write_text(
        "def pytest_collection_finish(session):\n"
        "    import triton, tests.kernel_device\n"
        "    print('runs on', tests.kernel_device.DEVICE, triton.knobs.runtime.interpret)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "said", "--device", "cuda"]
    done = subprocess.run(
        [*command, "tests/compile/test_norm_kernels.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "runs on cuda False" in done.stdout, done.stdout + done.stderr
