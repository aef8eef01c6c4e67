"""A backend: it makes the ops of a model, and all else that an engine needs to run them on its target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fastgen.compile.backends.kernels import KernelSet
from fastgen.compile.backends.model_ops import Ops
from fastgen.compile.backends.modules.collectives import AllReduce, Gather, HeadsOfRank, RankNorm
from fastgen.compile.backends.ops import AllReduceOp, GatherOp
from fastgen.compile.backends.shapes import LinearShape, ModelShape
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.build.loader import KernelLoader, Progress
from fastgen.compile.capture.cuda_graph import GraphPool
from fastgen.compile.host.ranks import DescribedRanks, Ranks
from fastgen.compile.host.thread_pool import ThreadPool
from fastgen.compile.ops.next_decodes.cpp import NextDecodesKernel
from fastgen.compile.ops.ranks.decodes import HearTokensKernel, TellTokensKernel
from fastgen.compile.ops.sampling import cpp, triton
from fastgen.compile.spec import KernelSpec

_CPU = torch.device("cpu")
# Log-probabilities of the likeliest tokens that kernels sampling on the device compute for a row, at most.
MAX_LOGPROBS = 20


class Backend(ABC):
    """A backend computes the ops of one model: torch, C++ kernels or Triton kernels.

    Ops are made first, by :meth:`ops` and the methods below it. :meth:`build` then builds their kernels, several at a
    time, and from there on they run. A backend is made of the ``facts`` of its target alone; only :meth:`build` and
    what runs afterwards need a ``loader``. Where several processes share a model, ``ranks`` connects this one to all.
    """

    # How an engine runs steps: by calling the modules, from tapes recorded when they first occur, or from graphs that
    # were all captured beforehand.
    steps: Literal["called", "taped", "captured"]
    # Tells if a step's batch is padded, so that the sizes of its tensors are few.
    pads_batches = True

    def __init__(self, facts: TargetFacts, loader: KernelLoader | None = None):
        self.facts, self.loader = facts, loader
        self.ranks: Ranks = DescribedRanks()
        self.kernels = KernelSet(loader)

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of activations in a model of ``dtype``."""
        return self.facts.activation_dtype(dtype)

    @abstractmethod
    def ops(self, model: ModelShape) -> Ops:
        """Returns what makes the ops of a model."""

    def splitting(self, shape: LinearShape) -> Ranks | None:
        """Returns the ranks that split the inputs of linear layers; ``None`` if nothing does."""
        return None if shape.sum_ranks is None else self.ranks

    def all_reduce(self, num_ranks: int, dtype: torch.dtype) -> AllReduceOp:
        """Returns the sum over all ranks of numbers of ``dtype``."""
        return AllReduce(self.ranks, num_ranks)

    def choose_sums(self, row_counts: Iterable[int], num_features: int, device: torch.device) -> None:
        """Chooses how ranks add, for steps of ``row_counts`` rows of ``num_features`` numbers. All ranks call it at
        once, when they have loaded."""
        return None  # there is one way

    def gather(self, num_ranks: int) -> GatherOp:
        """Returns what gathers columns of all ranks on rank 0."""
        return Gather(self.ranks, num_ranks)

    def rank_norm(self, norms: Sequence[HeadsOfRank], num_ranks: int) -> RankNorm:
        """Returns the norms of queries and keys over the heads of all ranks."""
        return RankNorm(self.all_reduce(num_ranks, torch.float32), norms, num_ranks)

    def kv_storage(
        self,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        latent_dim: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Returns room for keys ``[B, P, K, D]`` and values ``[B, P, K, D]``, laid out in memory as attention reads
        them. A backend may order the numbers inside a block in its own way. With a ``latent_dim`` values are the first
        features of the keys."""
        sizes = (num_blocks, block_size, num_heads, head_dim)
        k = torch.empty(sizes, dtype=dtype, device=device)
        if latent_dim is not None:
            return k, k[..., :latent_dim]
        # Not by `empty_like`: on `meta` torch imports sympy for that, which takes seconds.
        return k, torch.empty(sizes, dtype=dtype, device=device)

    def row_sampling(self, vocab_size: int, *, max_rows: int, device: torch.device = _CPU) -> cpp.SamplingKernel | None:
        """Returns the kernel that samples rows which the host describes in every step; ``None`` if there is none."""
        return None

    def slot_sampling(self, vocab_size: int, *, max_rows: int, sampled_ids: Tensor) -> triton.SamplingKernel | None:
        """Returns the kernels that sample on the device by the parameters of each slot, into ``sampled_ids [S]`` i32;
        ``None`` if there are none."""
        return None

    def next_decodes(self) -> NextDecodesKernel | None:
        """Returns the kernel that makes the inputs of a step of decodes of the step before; ``None`` if there is
        none."""
        return None

    def tell_tokens(self) -> TellTokensKernel | None:
        """Returns the kernel by which rank 0 tells others the tokens of steady decodes; ``None`` if there is none."""
        return None

    def hear_tokens(self) -> HearTokensKernel | None:
        """Returns the kernel by which another rank hears them; ``None`` if there is none."""
        return None

    def thread_pool(self) -> ThreadPool:
        """Returns the threads on which C++ kernels run."""
        raise NotImplementedError(f"{self.facts.name} kernels run on no threads of the host")

    def graph_pool(self, device: torch.device, *, expected_bytes: int = 0) -> GraphPool:
        """Returns what keeps the captured steps of an engine; see :class:`GraphPool`."""
        assert self.loader is not None, "steps are captured with kernels, which a loader loads"
        return GraphPool(device, self.loader, expected_bytes=expected_bytes)

    def engine_specs(self, vocab_size: int) -> list[KernelSpec]:
        """Returns the kernels that an engine needs beside those of the model's ops."""
        return []

    def specs(self) -> list[KernelSpec]:
        """Returns the kernels asked for so far, by name, each with every recipe node that needs it."""
        return self.kernels.specs()

    def build(self, progress: Progress | None = None) -> None:
        """Builds and loads the kernels asked for, if there are any. Raises :class:`fastgen.errors.KernelError`."""
        if self.specs():
            self.kernels.build(progress)
