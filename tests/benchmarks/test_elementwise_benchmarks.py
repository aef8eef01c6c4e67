"""The benchmarks of elementwise kernels and few-row linear, as far as they run without a GPU."""

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


def test_the_gate_of_elementwise_kernels_passes_and_can_fail(loader: KernelLoader, monkeypatch) -> None:
    import elementwise

    assert elementwise.gate(elementwise.TOY, 5, loader, CPU) <= elementwise.GATE_TOLERANCE
    for name, wrong in (
        ("apply_rotary", lambda x, *_: x),
        ("rms_norm", lambda x, *_: x),
        ("write_kv", lambda *_: None),
        ("activate_and_multiply", lambda x, _: x.chunk(2, dim=-1)[0]),
        ("embed", lambda ids, table: table[: len(ids)]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(elementwise, name, wrong)
            with pytest.raises(SystemExit, match=r"differs from the torch reference by .*: nothing is measured"):
                elementwise.gate(elementwise.TOY, 5, loader, CPU)


def test_the_gate_of_few_row_linear_passes_and_can_fail(loader: KernelLoader, monkeypatch) -> None:
    import few_row_linear

    shape = few_row_linear.FewRowShape(20, 40, "fp16", bias=True)
    assert few_row_linear.gate(shape, loader, 4, CPU) <= few_row_linear.GATE_TOLERANCE
    monkeypatch.setattr(few_row_linear, "few_row_linear", lambda x, weight, bias: x.new_zeros(len(x), 20))
    with pytest.raises(SystemExit, match="nothing is measured"):
        few_row_linear.gate(shape, loader, 4, CPU)


def test_without_a_gpu_they_say_so(loader: KernelLoader, capsys: pytest.CaptureFixture[str]) -> None:
    import elementwise
    import few_row_linear

    if torch.cuda.is_available():
        pytest.fail("run this where there is no GPU: `-m 'not gpu'` on a machine with one measures instead")
    for script in (elementwise, few_row_linear):
        assert script.main([]) == 2
        assert capsys.readouterr().err.startswith("no GPU here")
