"""The benchmarks of sampling and of mixtures of experts, as far as they run without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastgen.compile.build_triton import TritonBuilder
from fastgen.compile.cache import KernelCache
from fastgen.compile.loader import KernelLoader

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"
CPU = torch.device("cpu")


@pytest.fixture
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelLoader:
    """And the scripts can be imported."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return KernelLoader(TritonBuilder("interpret"), cache=KernelCache(tmp_path))


def test_the_gate_of_sampling_passes_and_can_fail(loader: KernelLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    import sampling

    assert sampling.gate(70, 5, loader, CPU) < sampling.MARGIN
    monkeypatch.setattr(sampling, "gumbel_noise", lambda seeds, *_: torch.randn(len(seeds), 70))
    with pytest.raises(SystemExit, match="nothing is measured"):
        sampling.gate(70, 5, loader, CPU)


def test_the_gate_of_mixtures_passes_and_can_fail(loader: KernelLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    import moe

    assert moe.gate(moe.TOY, 9, loader, CPU) <= moe.GATE_TOLERANCE
    monkeypatch.setattr(moe, "combine", lambda outputs, *_: outputs[:9])
    with pytest.raises(SystemExit, match="nothing is measured"):
        moe.gate(moe.TOY, 9, loader, CPU)


def test_without_a_gpu_sampling_and_mixtures_say_so(loader: KernelLoader, capsys: pytest.CaptureFixture[str]) -> None:
    import moe
    import sampling

    if torch.cuda.is_available():
        pytest.fail("run this where there is no GPU: `-m 'not gpu'` on a machine with one measures instead")
    for script in (moe, sampling):
        assert script.main(["--json", "nowhere.json"]) == 2
        assert capsys.readouterr().err.startswith("no GPU here")
