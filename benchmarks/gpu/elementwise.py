"""Measures fused elementwise kernels: bytes a second beside the machine's own copy bandwidth.

First a numeric gate: each kernel must equal its torch reference. Then the kernels between the matrix products of a
Llama-3-8B shape and those of a DeepSeek shape's latent attention are timed at several numbers of tokens. Each replay
goes through buffers that together exceed every cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from benchmarks.gpu.gates import excess, gate, run_repeatedly
from benchmarks.gpu.measuring import Bench, Row, Rows
from fastgen.compile.build.builder import Kernel
from fastgen.compile.ops.activation.reference import activate_and_multiply
from fastgen.compile.ops.activation.triton import ActivationKernel, activation_spec
from fastgen.compile.ops.embedding.reference import embed, resolve_token_ids
from fastgen.compile.ops.embedding.triton import EmbeddingKernel, RowGatherKernel, embedding_spec, row_gather_spec
from fastgen.compile.ops.kv_write.reference import write, write_kv
from fastgen.compile.ops.latent.triton import LatentKernel, latent_spec
from fastgen.compile.ops.norm.reference import rms_norm
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.norm.triton import NormKernel, norm_spec
from fastgen.compile.ops.overlap import overlapped
from fastgen.compile.ops.qkv.head_norm import HeadNorm
from fastgen.compile.ops.qkv.triton import QkvKernel, qkv_spec
from fastgen.compile.ops.rotary.reference import apply_rotary
from fastgen.compile.spec import KernelSpec, torch_dtype

TOLERANCE = 4e-2  # in bf16, of answers of size 1 and of a part of larger ones, rounded up to three times
EPS = 1e-6
TOKENS = (1, 64, 2048, 8192)


@dataclass(frozen=True)
class Sizes:
    """Holds a model's sizes: ``latent`` features, and ``rotary`` (rotated) and ``nope`` (other) ones of queries."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    features: int
    vocab: int
    latent: int
    rotary: int
    nope: int
    dtype: str


REAL = Sizes(4096, 32, 8, 128, 14336, 128256, 512, 64, 128, "bf16")
TOY = Sizes(64, 4, 2, 16, 96, 50, 32, 8, 16, "fp16")


@dataclass
class Subject:
    """A kernel in buffers of its own: ``run`` moves ``num_bytes`` to and from memory. It has written ``answers`` then,
    and the reference makes ``expected``. The kernel also reads those of its answers that are not ``unwritten`` before.
    """

    name: str
    num_bytes: int
    run: Callable[[], None]
    answers: list[Tensor]
    expected: Callable[[], list[Tensor]]
    unwritten: tuple[Tensor, ...] = ()

    def difference(self, runs: int) -> float:
        """Returns the largest difference from the reference, in units of what is allowed. The reference comes first,
        since kernels may change their input."""
        expected = self.expected()
        read = [each for each in self.answers if all(each is not other for other in self.unwritten)]
        run_repeatedly(self.name, self.run, runs, self.unwritten, read=read)
        return max(excess(*pair, TOLERANCE, TOLERANCE) for pair in zip(self.answers, expected, strict=True))


class Maker:
    """Makes subjects for ``num_tokens`` tokens."""

    def __init__(self, sizes: Sizes, num_tokens: int, bench: Bench):
        self.sizes, self.num_tokens, self.loader, self.where = sizes, num_tokens, bench.loader, bench.where
        self.dtype = torch_dtype(sizes.dtype)
        self.slots = torch.randperm(num_tokens, device=self.where)
        self.positions = torch.randint(0, 4096, (num_tokens,), dtype=torch.int32, device=self.where)

    def kernel(self, spec: KernelSpec) -> Kernel:
        """Returns a kernel as engines launch it."""
        return self.loader.load(overlapped(spec, self.loader.builder.arch))

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=self.dtype, device=self.where)

    @cached_property
    def vocabulary(self) -> Tensor:
        return self.normal(self.sizes.vocab, self.sizes.hidden)

    def angles(self, size: int) -> Tensor:
        angles = torch.outer(torch.arange(4096.0), 10000.0 ** -torch.linspace(0, 1, size // 2))
        return torch.cat([angles.cos(), angles.sin()], dim=1).to(self.where)

    def all(self) -> Iterator[Callable[[], Subject]]:
        yield from (self.norm, self.qkv, self.qkv_norm, self.latent_kv, self.activation, self.embedding, self.rows)

    def norm(self) -> Subject:
        size, dtype = self.sizes.hidden, self.sizes.dtype
        kernel = NormKernel(self.kernel(norm_spec(NormShape("rms", size, dtype, EPS, residual=True))))
        x, residual, out = (self.normal(self.num_tokens, size) for _ in range(3))
        weight = self.normal(size)

        def expected() -> list[Tensor]:
            return [x + residual, rms_norm(x + residual, weight, EPS)]

        return Subject(
            "RMS norm and residual",
            4 * x.nbytes,
            lambda: kernel(x, weight, None, out, residual),
            [residual, out],
            expected,
            (out,),
        )

    def qkv(self, norm: HeadNorm | None = None) -> Subject:
        sizes, size = self.sizes, self.sizes.head_dim
        kv_heads, heads = sizes.num_kv_heads, sizes.num_heads
        spec = qkv_spec(
            sizes.dtype,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            rotary_dim=size,
            q_norm=norm,
            k_norm=norm,
        )
        kernel = QkvKernel(self.kernel(spec))
        qkv = self.normal(self.num_tokens, (heads + 2 * kv_heads) * size)
        caches = [self.normal(-(-self.num_tokens // 16), 16, kv_heads, size) for _ in range(2)]
        given = {"cos_sin": self.angles(size)}
        given |= {} if norm is None else {f"{name}_norm_weight": self.normal(size) for name in ("q", "k")}

        def expected() -> list[Tensor]:
            q, k, v = qkv.clone().view(self.num_tokens, -1, size).split([heads, kv_heads, kv_heads], dim=1)
            if norm is not None:
                q, k = rms_norm(q, given["q_norm_weight"], EPS), rms_norm(k, given["k_norm_weight"], EPS)
            q, k = (apply_rotary(x, self.positions, given["cos_sin"]) for x in (q, k))
            k_cache, v_cache = (cache.clone() for cache in caches)
            write_kv(k, v, k_cache, v_cache, self.slots)
            return [q.flatten(1), k_cache, v_cache]

        return Subject(
            "rotary and KV write" if norm is None else "QK norm, rotary and KV write",
            2 * qkv.nbytes,
            lambda: kernel(qkv, self.positions, caches[0], caches[1], self.slots, **given),
            [qkv[:, : heads * size], *caches],
            expected,
        )

    def qkv_norm(self) -> Subject:
        return self.qkv(HeadNorm("rms", EPS))

    def latent_kv(self) -> Subject:
        sizes = self.sizes
        latent, rotary, nope, heads = sizes.latent, sizes.rotary, sizes.nope, sizes.num_heads
        norm = HeadNorm("rms", EPS)
        spec = latent_spec(sizes.dtype, norm, num_heads=heads, latent_dim=latent, nope_dim=nope, rotary_dim=rotary)
        kernel = LatentKernel(self.kernel(spec))
        kv, q = self.normal(self.num_tokens, latent + rotary), self.normal(self.num_tokens, heads, nope + rotary)
        q_latent, weight = self.normal(self.num_tokens, heads, latent + rotary), self.normal(latent)
        cache, table = self.normal(-(-self.num_tokens // 16), 16, 1, latent + rotary), self.angles(rotary)

        def expected() -> list[Tensor]:
            c, key = kv.unsqueeze(1).split([latent, rotary], dim=2)
            key = apply_rotary(key, self.positions, table)
            written = cache.clone()
            write(torch.cat([rms_norm(c, weight, EPS), key], dim=2), written, self.slots)
            return [written, apply_rotary(q[:, :, nope:], self.positions, table)]

        return Subject(
            "latent KV write and rotary",
            2 * kv.nbytes + 2 * self.num_tokens * heads * rotary * self.dtype.itemsize,
            lambda: kernel(kv, q, q_latent, self.positions, cache, self.slots, cos_sin=table, kv_norm_weight=weight),
            [cache, q_latent[:, :, latent:]],
            expected,
        )

    def activation(self) -> Subject:
        size = self.sizes.features
        kernel = ActivationKernel(self.kernel(activation_spec("silu", size, self.sizes.dtype, gated=True)))
        x, out = self.normal(self.num_tokens, 2 * size), self.normal(self.num_tokens, size)
        return Subject(
            "gated SiLU",
            x.nbytes + out.nbytes,
            lambda: kernel(x, out),
            [out],
            lambda: [activate_and_multiply(x, "silu")],
            (out,),
        )

    def embedding(self) -> Subject:
        sizes = self.sizes
        kernel = EmbeddingKernel(self.kernel(embedding_spec(sizes.hidden, sizes.dtype)))
        table, out = self.vocabulary, self.normal(self.num_tokens, sizes.hidden)
        ids, sampled = (
            torch.randint(0, sizes.vocab, (count,), dtype=torch.int32, device=self.where)
            for count in (self.num_tokens, 256)
        )
        source = torch.full((self.num_tokens,), -1, dtype=torch.int32, device=self.where)
        source[::16] = torch.randint(0, 256, source[::16].shape, dtype=torch.int32, device=self.where)
        return Subject(
            "embedding",
            2 * out.nbytes,
            lambda: kernel(ids, source, sampled, table, out),
            [out],
            lambda: [embed(resolve_token_ids(ids, source, sampled), table)],
            (out,),
        )

    def rows(self) -> Subject:
        size = self.sizes.hidden
        kernel = RowGatherKernel(self.kernel(row_gather_spec(size, self.sizes.dtype)))
        hidden, out = self.normal(2 * self.num_tokens, size), self.normal(self.num_tokens, size)
        indices = torch.randperm(2 * self.num_tokens, device=self.where)[: self.num_tokens].int()
        return Subject(
            "row gather",
            2 * out.nbytes,
            lambda: kernel(indices, hidden, out),
            [out],
            lambda: [embed(indices, hidden)],
            (out,),
        )


def check(sizes: Sizes, num_tokens: int, bench: Bench) -> float:
    """Returns the largest difference of any kernel from its reference. Raises where it is too large."""
    return max(_check(make, bench) for make in Maker(sizes, num_tokens, bench).all())


def _check(make: Callable[[], Subject], bench: Bench) -> float:
    torch.manual_seed(1)
    subject = make()
    return gate(subject.name, subject.difference(bench.gate_runs))


def measure(bench: Bench) -> Rows:
    sizes, all_tokens = (TOY, (5,)) if bench.toy else (REAL, TOKENS)
    wrong = set()
    for make in Maker(sizes, 5 if bench.toy else 64, bench).all():
        row = bench.attempt_gate(make.__name__, partial(_check, make, bench))
        yield row
        if "error" in row:
            wrong.add(make.__name__)
    for num_tokens in all_tokens:
        for make in Maker(sizes, num_tokens, bench).all():
            if make.__name__ not in wrong:
                yield bench.attempt(f"{make.__name__} × {num_tokens}", partial(measure_case, make, num_tokens, bench))


def measure_case(make: Callable[[], Subject], num_tokens: int, bench: Bench) -> Row:
    first = make()
    subjects = [first, *(make() for _ in range(1, bench.num_copies(first.num_bytes)))]
    time = bench.rotated_seconds([subject.run for subject in subjects])
    rate = first.num_bytes / time
    return {
        "case": f"{first.name} × {num_tokens}",
        "seconds": time,
        "fraction_of_copy": rate / bench.limits.copy_bytes_per_s,
        "bytes_per_s": rate,
    }
