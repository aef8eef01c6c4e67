"""Kernels that start before those before them end: their specs, their machine code, and how they are launched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastgen.compile import render
from fastgen.compile.build.bundle import write_bundle
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader, make_builder
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.build.triton_modules import stand_in_for_driver
from fastgen.compile.ops.activation.triton import activation_spec
from fastgen.compile.ops.embedding.triton import embedding_spec
from fastgen.compile.ops.experts.tiling import GroupedTiling
from fastgen.compile.ops.experts.triton import combine_spec, grouped_linear_spec, route_spec, sort_spec
from fastgen.compile.ops.latent.triton import latent_spec
from fastgen.compile.ops.linear.finish import Activate, AddAndNorm, RotateAndWrite
from fastgen.compile.ops.linear.tiling import FewRowShape, default_split
from fastgen.compile.ops.linear.triton import dequantize_spec, few_row_specs
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.norm.triton import norm_spec
from fastgen.compile.ops.overlap import overlapped
from fastgen.compile.ops.qkv.head_norm import HeadNorm
from fastgen.compile.ops.qkv.triton import qkv_spec
from fastgen.compile.ops.ranks.triton import sum_parts_spec, symmetric_sum_spec
from fastgen.compile.render import render_body
from fastgen.compile.spec import KernelSpec
from fastgen.models.kernels import kernel_specs
from tests.compile.sass import instructions
from tests.compile.sealed_loads import ABOUT, MADE_UP_GPU, run_beside_driver
from tests.fast import cases
from tests.models.test_launches import published

NORM = NormShape("rms", 4096, "bf16", 1e-5, residual=True)
# Names of instructions that read or write memory which other kernels may write or read.
MEMORY = re.compile(r"\b(LDG|STG|LDGSTS|ATOM|ATOMG|RED|UTMALDG|UTMASTG|UBLKCP)\b")


def few_row(shape: FewRowShape, *, finish: AddAndNorm | Activate | RotateAndWrite | None = None) -> list[KernelSpec]:
    specs = few_row_specs(shape, 1, default_split(shape, 1, "sm_90", 132), finish=finish)
    return [specs.main] if specs.reduce is None else [specs.main, specs.reduce]


# The kernels of a decode's step, the sampler's and attention's aside.
OF_A_DECODE = {
    "embedding": [embedding_spec(4096, "bf16")],
    "norm": [norm_spec(NORM)],
    "projection with rotation": few_row(FewRowShape(12288, 4096, "bf16"), finish=RotateAndWrite(32, 32, 128, 128)),
    "projection and sum with rotation": few_row(
        FewRowShape(6144, 4096, "bf16"), finish=RotateAndWrite(32, 8, 128, 128)
    ),
    "projection and norm": few_row(FewRowShape(4096, 4096, "bf16"), finish=AddAndNorm(NORM)),
    "gate and up": few_row(FewRowShape(28672, 4096, "bf16"), finish=Activate("silu", gated=True)),
}
OTHERS = {
    "in int4": few_row(FewRowShape(4096, 4096, "bf16", "int4_weight_only")),
    "in int8": few_row(FewRowShape(12288, 4096, "bf16", "int8_weight_only")),
    "in fp8 with odd sizes": few_row(FewRowShape(1000, 1001, "bf16", "fp8_weight_only", bias=True)),
    "in fp32": few_row(FewRowShape(1000, 1000, "fp32")),
    "head": few_row(FewRowShape(32000, 4096, "bf16", out_dtype="fp32")),
    "rotation": [qkv_spec("bf16", num_heads=32, num_kv_heads=32, head_dim=128, rotary_dim=128)],
    "activation": [activation_spec("silu", 11008, "bf16", gated=True)],
    "dequantize": [dequantize_spec(4096, "int4_weight_only", "bf16")],
    "latent": [latent_spec("bf16", HeadNorm("rms", 1e-6), num_heads=16, latent_dim=512, nope_dim=128, rotary_dim=64)],
    "experts": [
        route_spec(8, top_k=2, scoring="softmax", normalize=True),
        sort_spec(8, 16),
        grouped_linear_spec(4096, 14336, "bf16", GroupedTiling(16, 64, 64, 4, 3), top_k=2),
        combine_spec(4096, 2, "bf16"),
    ],
    "sum over ranks": [sum_parts_spec(2, "bf16"), sum_parts_spec(8, "fp32")],
    "sum through memory": [symmetric_sum_spec(2, "bf16", 1), symmetric_sum_spec(8, "fp32", 2)],
}


def check_instructions(specs: list[KernelSpec], directory: Path) -> None:
    loader = KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(directory), num_jobs=1)
    wanted = [overlapped(spec, "sm_90") for spec in specs]
    for spec, entry in zip(wanted, loader.build(wanted), strict=True):
        assert entry.report["spill_bytes"] == 0, spec
        texts = [text for _, text in instructions(entry.source.with_suffix(".cubin"))]
        (wait,) = (place for place, text in enumerate(texts) if "ACQBULK" in text)
        (release,) = (place for place, text in enumerate(texts) if "PREEXIT" in text)
        assert wait < release, spec
        # every program comes by the wait, and before it touches memory, except what no kernel of a step writes
        assert not any(re.search(r"\b(BRA|EXIT|RET)\b", text) for text in texts[:wait]), spec
        touching = [MEMORY.search(text) for text in texts[:wait]]
        loads_early = "norm" in spec.op or spec.op == "few_row_linear"
        assert {found[1] for found in touching if found} <= ({"LDG"} if loads_early else set()), spec
        stores = [place for place, text in enumerate(texts) if re.search(r"\b(STG|RED|ATOMG?)\b", text)]
        if spec.op == "few_row_linear":  # the next kernel starts when the weights are read
            reads = [place for place, text in enumerate(texts) if "LDGSTS" in text]
            assert reads or spec.parameters["IN"] % 8, "only rows at odd addresses are read in another way"
            assert max(reads, default=wait) < release < max(stores), spec
            if spec.parameters["weight"] == "plain" and reads:  # what the sums are finished with is there by then
                assert not any(re.search(r"\bLDG\b", text) for text in texts[wait:]), spec
        if spec.op == "few_row_norm":  # no addition of parts waits before the last part is requested
            loads = [place for place, text in enumerate(texts) if re.search(r"\bLDG\b", text)]
            additions = [place for place, text in enumerate(texts) if re.search(r"\bFADD\b", text)]
            assert max(loads) < min(additions), spec
        assert any(MEMORY.search(text) for text in texts[wait:]), spec
        # bringing weights to the cache ahead of the wait made steps slower on an H200
        assert not any(re.search(r"CCTL\.E\.P\w*2", text) for text in texts), spec


@pytest.mark.parametrize("name", cases(OF_A_DECODE, fast=("norm", "projection and sum with rotation")))
def test_kernels_of_a_decode_wait_and_then_read(name: str, tmp_path: Path) -> None:
    check_instructions(OF_A_DECODE[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels_wait_as_well(name: str, tmp_path: Path) -> None:
    check_instructions(OTHERS[name], tmp_path)


def test_only_gpus_that_can_overlap_do() -> None:
    spec = norm_spec(NORM)
    assert overlapped(spec, "sm_90").options["launch_pdl"] is True
    assert overlapped(spec, "sm_100").options["launch_pdl"] is True
    for arch in ("sm_80", "sm_89", "gfx942", "interpret"):
        assert overlapped(spec, arch) is spec
        assert "gdc" not in render_body(spec)


def test_a_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_OVERLAP", "0")
    assert "launch_pdl" not in overlapped(norm_spec(NORM), "sm_90").options


def test_a_kernel_that_would_not_wait_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = norm_spec(NORM)
    source = render._source
    monkeypatch.setattr(render, "_source", lambda name: source(name).replace("{{ overlap(spec)", "{{ ''"))
    monkeypatch.setattr(render, "render_text", lambda *_, **__: "no wait")
    assert overlapped(spec, "sm_90") is spec
    with pytest.raises(ValueError, match=r"norm\.py\.j2 has no gdc_wait, and .* is to start before"):
        render_body(replace(spec, options={**spec.options, "launch_pdl": True}))


def test_all_kernels_of_a_model_overlap() -> None:
    specs = kernel_specs(published("Mixtral-8x7B-v0.1"), KernelLoader(make_builder("sm_90")), torch.bfloat16)
    assert {"attention_plan", "attention", "sampling_choose"} <= {spec.op for spec in specs}
    assert not {spec.name for spec in specs if "launch_pdl" not in spec.options}


LAUNCH = """
import torch
from fastgen.compile.ops.overlap import overlapped
loader = load_bundle(sys.argv[1], h100)
x, weight, out = torch.empty(1, 64).bfloat16(), torch.empty(64).bfloat16(), torch.empty(1, 64).bfloat16()
for each in (spec, overlapped(spec, "sm_90")):
    loader.load(each)((1,), x, weight, out)
"""
# Prints the attributes of each launch. 6 is CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
RECORDING_LAUNCH = """
#include <stdio.h>
struct attribute { int id; char pad[4]; unsigned value; char rest[60]; };
struct config { unsigned grid[3], block[3], shared_bytes; void *stream; struct attribute *attributes; unsigned count; };
int cuLaunchKernelEx(const struct config *config, void *function, void **parameters, void **extra) {
    printf("launch");
    const struct attribute *each = config->attributes;
    for (unsigned i = 0; i < config->count; ++i, ++each) printf(" %d=%u", each->id, each->value);
    puts("");
    fflush(stdout);
    return 0;
}
"""


def recording_driver(place: Path) -> Path:
    """A library with the driver's name that prints launches."""
    place.mkdir()
    library, source = stand_in_for_driver(place), place / "driver.c"
    kept = [line for line in source.read_text().splitlines() if "int cuLaunchKernelEx(" not in line]
    source.write_text("\n".join([*kept, RECORDING_LAUNCH]))
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run([*command, str(source)], check=True)
    return place


def test_a_launch_says_that_it_overlaps(tmp_path: Path) -> None:
    """Launched around the just-in-time compiler, as kernels of steps are."""
    spec = norm_spec(NormShape("rms", 64, "bf16", 1e-5))
    loader = KernelLoader(TritonBuilder("sm_90"), cache=KernelCache(tmp_path / "cache"), num_jobs=1)
    write_bundle(loader, [spec, overlapped(spec, "sm_90")], tmp_path / "bundle", about=ABOUT)
    driver = str(recording_driver(tmp_path / "recording"))
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)])
    settings = {"PYTHONPATH": path, "LD_LIBRARY_PATH": driver, "TRITON_LIBCUDA_PATH": driver}
    done = run_beside_driver(sys.executable, MADE_UP_GPU + LAUNCH, [str(tmp_path / "bundle")], tmp_path, settings)
    assert done.returncode == 0, done.stderr
    launches = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("launch")]
    assert ["6=1" in attributes for attributes in launches] == [False, True], json.dumps(launches)
