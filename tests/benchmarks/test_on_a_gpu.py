"""On a GPU: every kind of kernel against its torch reference, and an engine's answers from graphs, eager and by torch.

`python -m benchmarks.gpu --parts tests` runs these, in an environment where kernels are not interpreted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import attention, elementwise, few_row_linear, moe, sampling
from benchmarks.gpu.llama import TOY, llama_engine, submit
from benchmarks.gpu.measuring import Bench, Limits
from benchmarks.gpu.steps import uncaptured
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TritonBuilder, triton_arch
from fastgen.compile.host import device as devices
from fastgen.compile.ops.attention.shape import AttentionShape
from fastgen.compile.ops.attention.tiling import chunk_tilings, decode_tilings
from fastgen.compile.ops.attention.tuning import tuned_tilings
from fastgen.compile.ops.linear.tiling import FewRowShape
from fastgen.compile.ops.linear.tuning import tuned_split

pytestmark = pytest.mark.gpu
SHAPE = replace(TOY, hidden=512, heads=4, kv_heads=2, ffn=768, vocab=1000, max_positions=512)


@pytest.fixture(scope="module")
def bench() -> Bench:
    device = devices.current("cuda")
    return Bench(device, KernelLoader(TritonBuilder(triton_arch(device))), Limits(1.0, 1.0), toy=False)


ATTENTIONS = [
    AttentionShape(8, 2, head_dim, 16, dtype, head_dim**-0.5)
    for dtype in ("bf16", "fp16")
    for head_dim in (64, 80, 96, 128, 256)
]


@pytest.fixture(scope="module")
def attention_bench(bench: Bench) -> Bench:
    """With all kernels built, several at a time."""
    attention.build(ATTENTIONS, attention.gated(bench), bench)
    return bench


@pytest.mark.parametrize("shape", ATTENTIONS, ids=lambda shape: f"{shape.dtype}-{shape.head_dim}")
def test_attention(attention_bench: Bench, shape: AttentionShape) -> None:
    attention.check(shape, attention_bench)


def test_elementwise_kernels(bench: Bench) -> None:
    elementwise.check(elementwise.REAL, 64, bench)


def test_few_row_linear(bench: Bench) -> None:
    few_row_linear.check(few_row_linear.FewRowShape(1000, 1040, "bf16", bias=True), bench)


def test_mixtures(bench: Bench) -> None:
    for num_tokens in (1, 33, 500):
        moe.check(moe.Shape("a mixture", 256, 128, 16, 4), num_tokens, bench)


def test_sampling(bench: Bench) -> None:
    sampling.check(32000, 64, bench)


def test_tuning_measures_every_way_and_keeps_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGEN_AUTOTUNE", raising=False)
    device, shape = devices.current("cuda"), FewRowShape(4096, 1024, "bf16")
    loader = KernelLoader(TritonBuilder(triton_arch(device)), cache=KernelCache(tmp_path))
    split = tuned_split(shape, 16, loader, device.torch_device)
    (file,) = (tmp_path / ".tuning").iterdir()
    kept = json.loads(file.read_text())
    assert kept["key"]["device"] == device.name
    assert len(kept["seconds"]) == len(kept["key"]["ways"])
    assert all(seconds > 0 for _, seconds in kept["seconds"])
    again = KernelLoader(loader.builder, cache=loader.cache)
    again.fence.close()
    assert tuned_split(shape, 16, again, device.torch_device) == split


def test_tuned_attention_is_one_of_its_ways(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FASTGEN_AUTOTUNE", raising=False)
    loader = KernelLoader(bench.loader.builder, cache=KernelCache(tmp_path))
    shape, arch = AttentionShape(8, 2, 128, 16, "bf16", 128**-0.5), loader.builder.arch
    chunk, decode = tuned_tilings(shape, 64, bench.num_sms, loader, bench.where)
    assert chunk in chunk_tilings(shape, arch)
    assert decode in decode_tilings(shape, arch)
    assert caplog.messages == [], "no default was taken without measuring it"
    assert len(list((tmp_path / ".tuning").iterdir())) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_engine_answers_alike_from_graphs_and_eager(dtype: torch.dtype) -> None:
    assert answers("graphs", dtype) == answers("eager", dtype)


def test_an_engine_answers_as_torch_does() -> None:
    """In fp32, where no token of these is won by a hair."""
    assert answers("graphs", torch.float32) == answers("torch", torch.float32)


def answers(how: str, dtype: torch.dtype) -> list[list[int]]:
    shape, device = replace(SHAPE, dtype=dtype), devices.current("cuda")
    target = "torch" if how == "torch" else "triton"
    engine = llama_engine(shape, device, kv_tokens=4000, max_num_seqs=8, token_budget=128, target=target)
    generations = submit(engine, [(3, 20), (200, 9), (1, 30), (64, 12), (130, 25)], seed=3)
    while engine.has_work:
        if how == "eager":
            with uncaptured(engine):
                engine.step()
        else:
            engine.step()
    return [each.output().token_ids for each in generations]
