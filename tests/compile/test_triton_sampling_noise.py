"""The noise of the Triton sampling kernels, bit by bit and draw by draw, and the distribution of what they draw."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fastgen.compile.build.loader import KernelLoader
from fastgen.compile.ops.sampling.reference import gumbel_noise, uniforms
from fastgen.compile.ops.sampling.triton import SamplingKernel, SlotSampling, sampling_specs
from fastgen.compile.render import render_body
from tests.chi_square import chi_square
from tests.kernel_device import DEVICE


@pytest.fixture(scope="module")
def loader(triton_kernels: KernelLoader) -> KernelLoader:
    return triton_kernels


KERNELS = """

@triton.jit
def noise_kernel(seed, position, index, words_ptr, noise_ptr, size: tl.constexpr):
    quad = tl.arange(0, size // 4)
    w0, w1, w2, w3 = tl.philox(seed, quad, quad * 0 + position, quad * 0 + index, quad * 0)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    tl.store(words_ptr + tl.arange(0, size), word.to(tl.int64))
    tl.store(noise_ptr + tl.arange(0, size), gumbel(word))


@triton.jit
def gumbel_kernel(words_ptr, noise_ptr, size: tl.constexpr):
    place = tl.arange(0, size)
    tl.store(noise_ptr + place, gumbel(tl.load(words_ptr + place).to(tl.uint32)))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Kernels of tests behind the source of a rendered one, whose function ``gumbel`` they call."""
    file = tmp_path_factory.mktemp("noise") / "noise_kernels.py"
    file.write_text(render_body(sampling_specs(64).draw) + KERNELS, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("noise_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.kernels
def test_noise_is_the_references_draw_by_draw(kernels: ModuleType) -> None:
    for seed, position, index in [(0, 0, 0), (-1, 7, 3), (2**62 + 12345, -1, -2), (-(2**63), 2**31 - 1, 1)]:
        words, noise = torch.zeros(4096, dtype=torch.int64, device=DEVICE), torch.zeros(4096, device=DEVICE)
        where = torch.tensor([seed]), torch.tensor([position & 0xFFFFFFFF]), torch.tensor([index & 0xFFFFFFFF])
        kernels.noise_kernel[(1,)](seed, position, index, words, noise, size=4096)
        words, noise = words.cpu(), noise.cpu()
        assert torch.equal(((words >> 9).float() + 0.5) * 2.0**-23, uniforms(*where, 4096)[0])
        torch.testing.assert_close(noise, gumbel_noise(*where, 4096)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.kernels
def test_noise_is_exact_where_a_logarithm_has_few_digits(kernels: ModuleType) -> None:
    """The largest numbers decide among many tokens: those of u next to 1."""
    top = 2**23 - 1
    steps = torch.tensor([0, 1, 2, top, top - 1, top - 2, *range(top - 262400, top - 261888), *range(500)])
    steps = torch.cat([steps, torch.randint(0, top, (1024 - len(steps),), generator=torch.Generator().manual_seed(1))])
    noise = torch.zeros(1024, device=DEVICE)
    kernels.gumbel_kernel[(1,)]((steps << 9).to(DEVICE), noise, size=1024)
    exact = -(-((steps.double() + 0.5) * 2.0**-23).log()).log()
    torch.testing.assert_close(noise.cpu(), exact.float(), rtol=1e-6, atol=5e-7)


def frequencies(kernels: SamplingKernel, logits: Tensor, num_draws: int) -> Iterator[Tensor]:
    """Yields how often each token is drawn for one row's logits by ``num_draws`` slots, at positions in turn."""
    slots = torch.arange(kernels.max_slots, dtype=torch.int32)
    kernels(logits.expand(len(slots), -1).contiguous(), slots, slots % num_draws)
    for tokens in kernels.buffer("token_ids").view(-1, num_draws):
        yield tokens.bincount(minlength=len(logits)).double()


def check_distribution(loader: KernelLoader, num_draws: int) -> None:
    logits = torch.tensor([0.3, 1.1, -9.0, 0.0])
    specs = sampling_specs(4, penalties=False, mask=False, bias=False, chunk=4)
    num_slots = 2 * num_draws  # a slot has one row in a step: rows of one would write its token at the same time
    kernels = SamplingKernel(specs, loader.load, max_rows=num_slots, max_slots=num_slots, device=torch.device("cpu"))
    for slot in range(num_draws):
        kernels.write(slot, SlotSampling(temperature=0.8, min_p=0.1, seed=3))
        kernels.write(num_draws + slot, SlotSampling(temperature=1.5, top_k=3, top_p=0.7, seed=4))
    for found, kept, temperature in zip(
        frequencies(kernels, logits, num_draws), ([0, 1, 3], [0, 1]), (0.8, 1.5), strict=True
    ):
        assert found.sum() == found[kept].sum() == num_draws
        expected = (logits[kept].double() / temperature).softmax(0) * num_draws
        statistic, limit = chi_square(found[kept].tolist(), expected.tolist())
        assert statistic < limit


def test_tokens_are_drawn_from_the_softmax(loader: KernelLoader) -> None:
    check_distribution(loader, 40)


@pytest.mark.slow
def test_tokens_are_drawn_from_the_softmax_many_times(loader: KernelLoader) -> None:
    check_distribution(loader, 4000)
