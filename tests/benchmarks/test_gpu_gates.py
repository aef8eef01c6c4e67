"""The numeric gates of the GPU benchmark: they pass on interpreted kernels, and can fail."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu import attention, elementwise, few_row_linear, moe, sampling
from benchmarks.gpu.gates import GateError
from benchmarks.gpu.measuring import Bench, Limits
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.host import device as devices


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    loader = KernelLoader(TritonBuilder("interpret"), cache=KernelCache(tmp_path_factory.mktemp("kernels")))
    return Bench(devices.current("cpu"), loader, Limits(1e9, 1e9), toy=True)


LINEAR = few_row_linear.FewRowShape(20, 40, "fp16", bias=True)
GATES: dict[ModuleType, tuple[Callable[[Bench], float], float]] = {
    attention: (lambda bench: attention.check(attention.TOY, bench), 1.0),
    elementwise: (lambda bench: elementwise.check(elementwise.TOY, 5, bench), 1.0),
    few_row_linear: (lambda bench: few_row_linear.check(LINEAR, bench), 1.0),
    moe: (lambda bench: moe.check(moe.TOY, 9, bench), 1.0),
    sampling: (lambda bench: sampling.check(70, 5, bench), sampling.MARGIN),
}
WRONG: list[tuple[ModuleType, str, Any]] = [
    (attention, "paged_attention", lambda q, k, v, *_, **__: q.new_zeros(*q.shape[:2], v.shape[3])),
    (elementwise, "apply_rotary", lambda x, *_: x),
    (elementwise, "rms_norm", lambda x, *_: x),
    (elementwise, "write_kv", lambda *_: None),
    (elementwise, "activate_and_multiply", lambda x, _: x.chunk(2, dim=-1)[0]),
    (elementwise, "embed", lambda ids, table: table[: len(ids)]),
    (few_row_linear, "logits", lambda x, weight, bias: x.new_zeros(len(x), 20)),
    (moe, "combine", lambda outputs, *_: outputs[:9]),
    (sampling, "gumbel_noise", lambda seeds, *_: torch.randn(len(seeds), 70)),
]


@pytest.mark.parametrize("module", GATES, ids=lambda module: module.__name__)
def test_a_gate_passes(module: ModuleType, bench: Bench) -> None:
    gate, tolerance = GATES[module]
    assert 0 <= gate(bench) <= tolerance


@pytest.mark.parametrize(("module", "name", "wrong"), WRONG, ids=lambda each: each if isinstance(each, str) else "")
def test_a_wrong_reference_shows(
    module: ModuleType, name: str, wrong: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(GateError, match="differs from the torch reference"):
        GATES[module][0](bench)
