"""Runs every C++ kernel at awkward sizes: zero and one of everything, one more than a vector, a chunk or a panel, and
rows that are not adjacent. Outputs are checked elsewhere; see ``captured_launches.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch

from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.ops.activation.cpp import ActivationKernel, activation_spec
from fastgen.compile.ops.activation.reference import ACTIVATIONS
from fastgen.compile.ops.add.cpp import AddKernel, add_spec
from fastgen.compile.ops.embedding.cpp import EmbeddingKernel, embedding_spec
from fastgen.compile.ops.experts.cpp import (
    CombineKernel,
    GroupedLinearKernel,
    RouteKernel,
    SortKernel,
    combine_spec,
    route_spec,
    sort_spec,
)
from fastgen.compile.ops.experts.reference import Scoring
from fastgen.compile.ops.latent.cpp import LatentKernel, latent_spec
from fastgen.compile.ops.linear.cpp import LinearKernel, linear_spec
from fastgen.compile.ops.next_decodes.cpp import NextDecodesKernel, next_decodes_spec
from fastgen.compile.ops.norm.cpp import NormKernel
from fastgen.compile.ops.norm.cpp import norm_spec as norm_of_rows
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.sampling.cpp import RowSampling, SampledRow, SamplingKernel, sampling_spec
from fastgen.compile.ops.softcap.cpp import SoftcapKernel, softcap_spec
from fastgen.compile.spec import DTYPES, torch_dtype
from fastgen.compile.weights.packed import TILED, PackedWeight, WeightFormat, formats_of
from fastgen.compile.weights.prepared_rows import row_format
from tests.compile import test_cpp_attention as attention
from tests.compile import test_cpp_latent as latent
from tests.compile import test_cpp_qkv as qkv
from tests.compile import test_cpp_sampling as sampling
from tests.compile.arches import EMULATED
from tests.compile.linear_cases import FORMATS, draw
from tests.compile.norms import norm_kernel, norm_spec

Run = Callable[[KernelLoader], None]


def drawn(*shape: int, seed: int = 0, dtype: str = "fp32") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch_dtype(dtype))


def run_linear(weight_format: WeightFormat, loader: KernelLoader) -> None:
    kernel = loader.load(linear_spec(weight_format, loader.builder.arch))
    for num_rows, out_features, in_features, num_groups in (
        *((1, 1, 1, 1), (1, 33, 130, 3), (2, 200, 33, 1), (5, 16, 2081, 1), (12, 33, 31, 1)),
        *((13, 65, 129, 3), (24, 1, 70, 2), (25, 33, 64, 1), (101, 75, 130, 2)),
    ):
        launcher = LinearKernel(kernel, num_rows * num_groups, in_features)
        packed = launcher.pack(out_features, in_features, num_groups=num_groups)
        for group in range(num_groups):
            packed.group(group).write(0, drawn(out_features, in_features, seed=group))
            packed.group(group).bias[:out_features] = drawn(out_features)
        x = draw(num_rows, num_rows * num_groups, 1, in_features + 3)[0].view(num_rows, num_groups, -1)
        out = torch.full((num_rows, num_groups, out_features + 1), torch.nan)
        launcher(x[..., 1:-2], packed, out[..., 1:])


def run_routed(weight_format: WeightFormat, loader: KernelLoader) -> None:
    kernel = loader.load(linear_spec(weight_format, loader.builder.arch, routed=True))
    sort = {count: SortKernel(loader.load(sort_spec(count))) for count in (1, 2, 8)}
    for num_tokens, top_k, num_experts, out_features, in_features, has_row_per_choice in (
        *((1, 1, 1, 1, 1, False), (1, 2, 8, 33, 70, True), (3, 2, 8, 65, 129, False)),
        *((33, 4, 2, 31, 32, False), (101, 2, 8, 40, 2081, True)),
    ):
        num_rows = num_tokens * (top_k if has_row_per_choice else 1)
        launcher = GroupedLinearKernel(kernel, num_tokens * top_k, in_features)
        packed = launcher.pack(out_features, in_features, num_groups=num_experts)
        for expert in range(num_experts):
            packed.group(expert).write(0, drawn(out_features, in_features, seed=expert))
        choices = torch.arange(num_tokens * top_k).square() % num_experts  # of squares, so that some go empty
        launcher.route(drawn(num_rows, in_features), sort[num_experts](choices.view(num_tokens, top_k)), packed)


def run_prepared(weight_format: WeightFormat, loader: KernelLoader) -> None:
    """Norms and activations that write rows for a linear layer, which reads them in place of its own."""
    arch = loader.builder.arch
    rows, linear = row_format(weight_format, arch), loader.load(linear_spec(weight_format, arch))
    assert rows is not None
    for size in (1, 33, 130):
        norm = NormKernel(loader.load(norm_of_rows(NormShape("rms", size, "fp32", 1e-5, residual=True), rows)), rows)
        spec = activation_spec("silu", arch, gated=True, rows=rows, num_features=size)
        activation, launcher = ActivationKernel(loader.load(spec), rows), LinearKernel(linear, 1, 1)
        packed = launcher.pack(33, size)
        packed.write(0, drawn(33, size))
        for num_rows in (1, 5, 17):
            x = (4 * drawn(num_rows, size)).round()  # the sum of squares is exact, in any order
            normed = norm.empty_out(x)
            norm(x, drawn(size), None, normed, x.clone())
            for prepared in (normed, activation(drawn(num_rows, 2 * size))):
                launcher(prepared, packed, torch.empty(num_rows, 33))


def run_attention(feature: str | None, loader: KernelLoader) -> None:
    shape = attention.with_features(*([feature] if feature else []))
    for seed, lengths in enumerate(([(1, 1)], [(0, 0), (1, 37)], [(1, 1300), (1, 16), (0, 0)], [(70, 700), (3, 3)])):
        attention.Batch(shape, lengths, seed, num_padding=seed % 2).computed(loader, num_threads=3)


def run_qkv(which: int, loader: KernelLoader) -> None:
    shape = qkv.SHAPES[which]
    kernel = qkv.load(loader, shape)
    for num_tokens in (0, 1, 2, 23):
        qkv.Case(shape, num_tokens, seed=num_tokens).run(kernel)


def run_latent(which: int, loader: KernelLoader) -> None:
    shape = latent.drawn_shape(which)
    kernel = LatentKernel(loader.load(latent_spec(loader.builder.arch, **vars(shape))))
    for num_tokens in (0, 1, 2, 23):
        latent.Case(shape, num_tokens).run(kernel)


def run_norms(loader: KernelLoader) -> None:
    for size, dtype in ((1, "fp32"), (37, "bf16"), (129, "fp16")):
        for kind in ("rms", "layer"):
            has = {"bias": kind == "layer", "weight": size > 1, "residual": size != 37, "offset": float(size == 129)}
            scale = 0.22 if has["residual"] else 1.0
            kernel = norm_kernel(loader.load(norm_spec("cpp", kind, size, dtype, 1e-5, scale=scale, **has)))  # type: ignore[arg-type]
            for num_rows in (0, 1, 9, 33):
                x, residual, out = (drawn(num_rows, size, seed=seed, dtype=dtype) for seed in range(3))
                kernel(x, drawn(size, dtype=dtype), drawn(size, dtype=dtype), out, residual)


def run_pointwise(loader: KernelLoader) -> None:
    """Runs activations, caps and sums."""
    arch = loader.builder.arch
    kinds = {activation_spec(kind, arch, gated=False).name: kind for kind in ACTIVATIONS}.values()
    for index, kind in enumerate(kinds):
        gated = index % 2 == 0
        activation = ActivationKernel(loader.load(activation_spec(kind, arch, gated=gated)))
        for num_rows, size in ((0, 5), (1, 1), (9, 17), (17, 33)):
            activation(drawn(num_rows, size * (1 + gated) + 3)[:, : size * (1 + gated)] * 50)
    cap, add = SoftcapKernel(loader.load(softcap_spec(30.0, arch))), AddKernel(loader.load(add_spec(arch, 0.22)))
    for count in (0, 1, 17, 2**14 + 1):
        cap(drawn(count) * 100)
        add(drawn(1, count), drawn(1, count, seed=1))


def run_tables(weight_format: WeightFormat, loader: KernelLoader) -> None:
    """Gathers rows of a packed table and adds positions; likewise of a plain table, unless the codes are integers."""
    arch, generator = loader.builder.arch, torch.Generator().manual_seed(1)
    packed = EmbeddingKernel(loader.load(embedding_spec(arch, weight_format, packed=True, scale=8.0)))
    for num_rows, size in ((1, 1), (33, 37), (70, 65)):
        ids, sampled = (torch.randint(num_rows, (count,), dtype=torch.int32, generator=generator) for count in (23, 4))
        source = torch.randint(-1, 4, (23,), dtype=torch.int32, generator=generator)
        table = PackedWeight(weight_format, num_rows, size, arch)
        table.write(0, drawn(num_rows, size))
        packed(table, torch.empty(23, size), ids, source, sampled)
        if weight_format in DTYPES.values():
            plain = EmbeddingKernel(loader.load(embedding_spec(arch, weight_format, packed=False)))
            places = EmbeddingKernel(loader.load(embedding_spec(arch, weight_format, packed=False, offset=2)))
            plain(drawn(num_rows, size, dtype=weight_format), out := torch.empty(23, size), ids, source, sampled)
            places(drawn(num_rows + 2, size, dtype=weight_format), out, ids)


def run_experts(loader: KernelLoader) -> None:
    """Runs the kernels around the experts' layers: routing, sorting and combining."""
    arch = loader.builder.arch
    for seed, scoring in enumerate(get_args(Scoring)):
        groups = {"num_groups": 3, "top_groups": 2} if seed else {}
        route = RouteKernel(
            loader.load(
                route_spec(
                    arch, 21, top_k=5, scoring=scoring, normalize=bool(seed), corrected=scoring == "sigmoid", **groups
                )
            )
        )
        combine = CombineKernel(loader.load(combine_spec(arch, top_k=5, shared=seed > 0, gated=seed > 1)))
        sort = SortKernel(loader.load(sort_spec(21)))
        for num_tokens in (0, 1, 9, 70):
            logits = drawn(num_tokens, 21).mul(2).round() / 2
            experts, weights = route(logits, drawn(21) if scoring == "sigmoid" else None)
            sort(experts)
            added, gates = drawn(num_tokens, 37), drawn(num_tokens, 1)
            outputs = drawn(num_tokens * 5, 37)
            combine(outputs, weights, added if seed else None, gates if seed > 1 else None)


def run_sampling(loader: KernelLoader) -> None:
    kernel = loader.load(sampling_spec(loader.builder.arch, slice_size=1024))
    for vocab_size in (1, 7, 1025, 5003):
        rng = random.Random(vocab_size)
        rows = [sampling.random_row(rng, vocab_size) for _ in range(24)]
        rows += [SampledRow(RowSampling(num_top=count), 3) for count in (0, 1, 20) if count <= vocab_size]
        logits = sampling.random_logits(rng, len(rows), vocab_size)
        SamplingKernel(kernel, vocab_size, max_rows=len(rows), max_threads=3)(logits, rows)
        SamplingKernel(kernel, vocab_size, max_rows=1, max_threads=3).greedy(logits[:1])


def run_next_decodes(loader: KernelLoader) -> None:
    kernel, slots = NextDecodesKernel(loader.load(next_decodes_spec())), torch.tensor([0, 2, 5], dtype=torch.int32)
    tables = torch.arange(2 * 6 * 3, dtype=torch.int32).view(2, 6, 3)
    for num_rows in range(4):
        ids, source, positions = (torch.zeros(num_rows, dtype=torch.int32) for _ in range(3))
        lengths, kv_slots = torch.ones(6, dtype=torch.int32), torch.zeros(2, num_rows, dtype=torch.int64)
        sampled = torch.ones(num_rows, dtype=torch.int64)
        for token_id in range(11):  # to the end of the tables
            chosen = torch.full((num_rows,), token_id)
            inputs = (ids, source, positions, lengths, kv_slots, sampled)
            kernel(chosen, slots[:num_rows], tables, *inputs, block_size=4)


RUNS: dict[str, Run] = {
    "norms": run_norms,
    "pointwise": run_pointwise,
    "experts": run_experts,
    "sampling": run_sampling,
    "next decodes": run_next_decodes,
    **{f"linear {each}": partial(run_linear, each) for each in FORMATS},
    **{f"routed {each}": partial(run_routed, each) for each in FORMATS},
    **{f"prepared {each}": partial(run_prepared, each) for each in TILED},
    **{f"tables {each}": partial(run_tables, each) for each in FORMATS},
    **{f"attention {each or 'plain'}": partial(run_attention, each) for each in (None, *attention.FEATURES)},
    **{f"qkv {which}": partial(run_qkv, which) for which in sorted(qkv.FAST)},
    **{f"latent {which}": partial(run_latent, which) for which in range(4)},
}


def names_of(arch: str) -> list[str]:
    """Returns the names of the runs whose arithmetic the instruction set supports. Of one that is emulated only those
    of its own arithmetic: all others are the same code as on the next one.
    """
    if arch in EMULATED:
        of_weights = [f"{name} {each}" for name in ("linear", "routed", "prepared") for each in TILED]
        return ["attention bf16", "attention bf16 in large blocks", *of_weights]
    beyond = set(FORMATS) - set(formats_of(arch))
    return [name for name in RUNS if name.split()[-1] not in beyond and name != "prepared bf16"]


def run(name: str, loader: KernelLoader) -> None:
    """Runs the kernels of that name on three threads, and restores the pool's size."""
    pool = load_thread_pool(loader)
    before = pool.resize(pool.num_threads)
    pool.resize(3)
    try:
        RUNS[name](loader)
    finally:
        pool.resize(before)
