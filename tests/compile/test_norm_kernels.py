"""Norm kernels on every target, against their reference, and as built for GPUs that are not here."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, cpp_arch
from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.build.triton import TRITON_ARCHES, TritonBuilder
from fastgen.compile.host.device import current
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.norm import cpp, triton
from fastgen.compile.ops.norm.reference import layer_norm, rms_norm
from fastgen.compile.spec import KernelSpec, torch_dtype
from tests.compile.arches import in_each_width
from tests.compile.norms import norm_kernel, norm_spec
from tests.fast import cases
from tests.kernel_device import DEVICE

SEED = 20
RUNNABLE = CPP_ARCHES[CPP_ARCHES.index(cpp_arch(current("cpu"))) :]


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path)


def drawn_norms(target: str, arch: str, count: int) -> list[KernelSpec]:
    draw = random.Random(f"{SEED} {arch}")
    specs = []
    for _ in range(count):
        kind, residual = draw.choice(["rms", "layer"]), draw.random() < 0.5
        specs.append(
            norm_spec(
                target,
                kind,
                draw.choice([1, 2, 3, 17, 64, 96, 127, 128, 257, 1000, 1024]),
                draw.choice(["fp32", "fp16", "bf16"]),
                draw.choice([1e-5, 1e-6, 0.1]),
                weight=draw.random() < 0.8,
                bias=kind == "layer" and draw.random() < 0.6,
                offset=draw.choice([0.0, 0.0, 1.0]),
                residual=residual,
                scale=draw.choice([1.0, 0.22]) if residual else 1.0,
            )
        )
    return specs


def check_norm(kernel: cpp.NormKernel | triton.NormKernel, spec: KernelSpec, num_rows: int) -> None:
    """Against the reference in fp32: equal up to the order of summation, and to what the kernel rounds to 16 bits."""
    generator = torch.Generator().manual_seed(SEED)
    has, dtype = spec.parameters, torch_dtype(str(spec.parameters["dtype"]))
    size = has["H"]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    # Nothing that the kernel writes may reach beyond its rows: one more row stands behind them.
    x, stream, out = (drawn(num_rows + 1, size) for _ in range(3))
    weight, bias = drawn(size) if has["weight"] else None, drawn(size) if has["bias"] else None
    summed, behind = stream.clone(), out[-1].clone()
    if has["residual"]:
        summed[:-1] += x[:-1] * has["scale"] if has["scale"] else x[:-1]
    kernel(x[:-1], weight, bias, out[:-1], stream[:-1])
    assert torch.equal(stream[-1], summed[-1]), spec
    assert torch.equal(out[-1], behind), spec

    # Triton's interpreter cuts bits off where hardware rounds to bf16. A GPU adds a scaled x in fp32 unrounded.
    cuts_off = spec.target == "triton" and dtype == torch.bfloat16 and DEVICE == "cpu"
    unrounded = spec.target == "triton" and dtype == torch.float32 and has["scale"] and DEVICE != "cpu"
    bits = 2**-6 if cuts_off else 2**-23 if unrounded else 0
    torch.testing.assert_close(stream, summed, rtol=bits, atol=bits, msg=lambda text: f"{spec}: {text}")
    normed, offset = (stream if has["residual"] else x)[:-1].float(), float(has["offset"] or 0.0)
    weight, bias = (None if each is None else each.float() for each in (weight, bias))
    if spec.op == "rms_norm":
        want = rms_norm(normed, weight, has["eps"], offset)
    else:
        want = layer_norm(normed, weight, bias, has["eps"], offset)
    rounding = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-7 if cuts_off else 2**-8}[dtype]
    tolerance = (1 + rounding) ** 2 - 1 + 1e-5  # rounded before it is weighted and after
    torch.testing.assert_close(out[:-1].float(), want, rtol=tolerance, atol=1e-5, msg=lambda text: f"{spec}: {text}")


@pytest.mark.parametrize("arch", in_each_width(RUNNABLE))
def test_norms_in_cpp_compute_what_the_reference_does(cache, arch) -> None:
    loader = KernelLoader(CppBuilder(arch), cache=cache)
    load_thread_pool(loader)
    specs = drawn_norms("cpp", arch, 5)
    loader.build(specs)
    for spec in specs:
        for num_rows in (0, 1, 5):
            check_norm(norm_kernel(loader.load(spec)), spec, num_rows)


def test_norms_in_triton_compute_what_the_reference_does(triton_kernels: KernelLoader) -> None:
    for spec in drawn_norms("triton", "interpret", 40):
        for num_rows in (0, 1, 5):
            check_norm(norm_kernel(triton_kernels.load(spec)), spec, num_rows)


@pytest.mark.parametrize(("target", "dtype"), [("triton", "fp16"), ("cpp", "fp16"), ("cpp", "bf16")])
def test_rms_norms_round_before_they_are_weighted(triton_kernels: KernelLoader, cache, target: str, dtype: str) -> None:
    """So do the models: the tolerance of other tests would not show it."""
    loader = triton_kernels if target == "triton" else KernelLoader(CppBuilder(RUNNABLE[0]), cache=cache)
    if target == "cpp":
        load_thread_pool(loader)
    generator, size, kind = torch.Generator().manual_seed(SEED), 1000, torch_dtype(dtype)
    x, weight = torch.randn(9, size, generator=generator).to(kind), torch.randn(size, generator=generator).to(kind)
    out = torch.empty_like(x)
    norm_kernel(loader.load(norm_spec(target, "rms", size, dtype, 1e-5)))(x, weight, None, out, x)
    normed = rms_norm(x.float(), None, 1e-5, 0.0)
    rounded = (normed.to(kind).float() * weight.float()).to(kind)
    at_the_end = (normed * weight.float()).to(kind)
    assert (out == rounded).float().mean() > 0.99
    assert (out == at_the_end).float().mean() < 0.9


@pytest.mark.parametrize("given", [{"kind": "rms", "bias": True}, {"scale": 0.5}])
def test_a_norm_that_does_not_exist_has_no_kernel(given) -> None:
    with pytest.raises(ValueError, match=r"bias=True|scale=0\.5"):
        norm_spec("cpp", size=64, dtype="fp32", eps=1e-5, **{"kind": "rms"} | given)


@pytest.mark.parametrize("arch", cases(TRITON_ARCHES, fast=("sm_90",)))
def test_norms_are_built_ahead_of_time_without_spills(cache, arch, capfd) -> None:
    specs = [
        norm_spec("triton", "rms", 4096, "bf16", 1e-5, residual=True),
        norm_spec("triton", "layer", 12288, "fp32", 1e-5, bias=True, residual=True),
        norm_spec("triton", "rms", 16384, "bf16", 1e-5, offset=1.0, residual=True, scale=0.22),
    ]
    loader = KernelLoader(TritonBuilder(arch), cache=cache, num_jobs=1)
    for entry in loader.build(specs):
        report = entry.report
        assert report["spill_bytes"] == 0
        assert 16 <= report["registers"] <= 128
        assert report["shared_bytes"] <= 256 < report["shared_limit_bytes"]
        assert report["matrix_instructions"] == {}
        assert 0.1 < report["occupancy"] <= 1
        binary = entry.source.with_suffix(".hsaco" if arch.startswith("gfx") else ".cubin").read_bytes()
        assert report["binary_bytes"] == len(binary)
        assert str(cache.directory).encode() not in binary  # so that a cache may be moved
    assert capfd.readouterr().out == ""
