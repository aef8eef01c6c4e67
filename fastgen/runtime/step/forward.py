"""The model's part of a step: hidden states of its tokens, and logits of the rows that need them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fastgen.compile.capture.cuda_graph import Graph, GraphPool
from fastgen.compile.capture.recording import library_call
from fastgen.compile.capture.tape import Tape
from fastgen.errors import CaptureError
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.models.causal_lm import CausalLM
from fastgen.runtime.scheduling.policies.splitfuse import smallest_size
from fastgen.runtime.step.plan_costs import PlanCosts
from fastgen.runtime.step.trial_batch import TrialBatch

# Returns the static inputs of a step with this many tokens, and this many rows that need logits.
Views = Callable[[int, int], RaggedBatch]
# Samples from the logits of a step's first rows.
Sample = Callable[[Tensor], None]
# How far a replay may differ from the step itself, as a share of the largest number.
_TOLERANCES = {torch.float32: 1e-4}
_TOLERANCE = 2e-2  # where numbers have 16 bits


class Forward:
    """Runs the model's part of steps: here by calling its modules in this process. Results are valid until the next
    step."""

    def __init__(self, model: CausalLM, kv_cache: PagedKVCache):
        self.model, self.kv_cache = model, kv_cache

    def hidden(self, batch: RaggedBatch) -> Tensor:
        """Returns the hidden states ``[T, H]``. Writes the batch's keys and values."""
        hidden: Tensor = self.model(batch, self.kv_cache)
        return hidden

    def logits(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        """Returns the logits ``[R, V]`` in fp32 of the rows ``batch.logits_indices`` of this step's ``hidden``."""
        return self.model.logits(hidden[batch.logits_indices.long()])

    def some_logits(self, hidden: Tensor, first: int, end: int) -> Tensor:
        """Returns the logits in fp32 of the tokens ``first`` to ``end`` of this step's ``hidden``."""
        return self.model.logits(hidden[first:end])

    def copy_blocks(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies blocks of the KV cache; see :meth:`PagedKVCache.copy_blocks`."""
        self.kv_cache.copy_blocks(group, sources, destinations)

    @property
    def lost(self) -> str | None:
        """Returns why no step can run any more; ``None`` while steps can."""
        return None

    @property
    def plan_costs(self) -> PlanCosts:
        """Returns the cost so far of leading other ranks."""
        return PlanCosts()

    def check(self) -> None:
        """Raises :class:`~fastgen.errors.RankError` if ranks were lost, so that results cannot be trusted."""

    def close(self) -> None:
        """Releases captured steps, and ends other processes that take part. No step may follow."""


@dataclass(frozen=True)
class Results:
    """The sizes of a step's results: ``hidden [T, hidden_size]`` of ``dtype``, ``logits [R, vocab_size]`` in fp32."""

    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    def new_hidden(self, max_tokens: int) -> Tensor:
        """Returns the buffer of hidden states."""
        return torch.zeros(max_tokens, self.hidden_size, dtype=self.dtype, device=self.device)

    def new_logits(self, max_rows: int) -> Tensor:
        """Returns the buffer of logits."""
        return torch.zeros(max_rows, self.vocab_size, device=self.device)


class _ReplayedForward(Forward):
    """Replays steps that were recorded in ``pool``, by their number of tokens or rows. They read ``views`` and leave
    their ``results`` in static buffers.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: PagedKVCache,
        pool: GraphPool,
        views: Views,
        results: Results,
        *,
        max_tokens: int,
        max_rows: int,
    ):
        super().__init__(model, kv_cache)
        self._pool, self._views = pool, views
        self._forwards: dict[int, Graph] = {}
        self._heads: dict[int, Graph] = {}
        self._hidden, self._logits = results.new_hidden(max_tokens), results.new_logits(max_rows)

    def _forward_step(self, num_tokens: int) -> None:
        hidden = self.model(self._views(num_tokens, 0), self.kv_cache)
        library_call(torch.Tensor.copy_, self._hidden[:num_tokens], hidden)

    def _head_step(self, num_rows: int) -> None:
        rows = self._hidden.new_empty(num_rows, self._hidden.shape[1])
        indices = self._views(0, num_rows).logits_indices
        library_call(torch.index_select, self._hidden, 0, indices, out=rows)
        self.model.logits(rows, out=self._logits[:num_rows])


class TapedForward(_ReplayedForward):
    """Runs steps of recurring sizes from tapes, which are recorded when a number of tokens or rows first occurs. All
    small sizes recur, and the ascending ``sizes``, which the scheduler fills. Other numbers of tokens are recorded when
    they have occurred ``OFTEN`` times in a while: recording takes longer than several steps gain by it. At most
    ``MOST_OTHERS`` of these tapes are kept, those used last.
    """

    SMALL = 64
    OFTEN, MOST_OTHERS = 8, 64

    def __init__(
        self,
        model: CausalLM,
        kv_cache: PagedKVCache,
        pool: GraphPool,
        views: Views,
        results: Results,
        *,
        sizes: Sequence[int],
        max_rows: int,
    ):
        super().__init__(model, kv_cache, pool, views, results, max_tokens=sizes[-1], max_rows=max_rows)
        self._sizes, self._recurring = sizes, {*range(1, min(self.SMALL, sizes[-1]) + 1), *sizes}
        # How often each other number of tokens has occurred lately, and tapes of some, the one used last at the end.
        self._num_seen, self._others, self._keeps_others = Counter[int](), dict[int, Graph](), True
        # The largest is recorded first, so that the intermediate tensors of all others fit into its memory. Then comes
        # the step of a single request, whose second token would be late otherwise.
        with torch.inference_mode():
            for num_tokens in (sizes[-1], 1):
                self._forwards[num_tokens] = self._record(num_tokens)
            self._heads[1] = self._record_head(1)

    def hidden(self, batch: RaggedBatch) -> Tensor:
        num_tokens = len(batch.input_ids)
        tape = self._tape(num_tokens) if num_tokens in self._recurring else self._tape_of_other(num_tokens)
        if tape is None:
            return super().hidden(batch)
        tape.replay()
        return self._hidden[:num_tokens]

    def _tape(self, num_tokens: int) -> Graph:
        if num_tokens not in self._forwards:
            self._forwards[num_tokens] = self._record(num_tokens)
        return self._forwards[num_tokens]

    def _tape_of_other(self, num_tokens: int) -> Graph | None:
        """Returns the tape of a number of tokens that need not recur, or ``None`` until it has occurred often."""
        if (tape := self._others.pop(num_tokens, None)) is None:
            if self._num_seen.total() == self.OFTEN * self.MOST_OTHERS:  # else all would occur often in the end
                self._num_seen.clear()
            self._num_seen[num_tokens] += 1
            if not self._keeps_others or self._num_seen[num_tokens] < self.OFTEN:
                return None
            del self._num_seen[num_tokens]
            if len(self._others) == self.MOST_OTHERS:
                del self._others[next(iter(self._others))]
            tape = self._record(num_tokens)
        self._others[num_tokens] = tape
        return tape

    def record_sizes(self) -> None:
        """Records the tapes of all sizes now, and those of other numbers of tokens never, so that no step has to: some
        milliseconds each.
        """
        self._keeps_others = False
        with torch.inference_mode():
            for num_tokens in reversed(self._sizes):
                if num_tokens not in self._forwards:
                    self._forwards[num_tokens] = self._record(num_tokens)
            for num_rows in range(len(self._logits), 0, -1):
                if num_rows not in self._heads:
                    self._heads[num_rows] = self._record_head(num_rows)

    def _record_head(self, num_rows: int) -> Graph:
        return self._pool.record(f"logits of {num_rows} rows", partial(self._head_step, num_rows))

    def _record(self, num_tokens: int) -> Graph:
        return self._pool.record(f"a step of {num_tokens} tokens", partial(self._forward_step, num_tokens))

    def logits(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        num_rows = len(batch.logits_indices)
        if not num_rows or not (len(hidden) in self._recurring or len(hidden) in self._others):
            return super().logits(hidden, batch)
        if num_rows not in self._heads:
            self._heads[num_rows] = self._record_head(num_rows)
        self._heads[num_rows].replay()
        return self._logits[:num_rows]

    def record_decodes(self, num_rows: int, prepare: Callable[[], None], sample: Sample) -> Tape:
        """Records a whole step of ``num_rows`` decodes: ``prepare`` writes its inputs, and ``sample`` gets the
        logits.
        """

        def step() -> None:
            prepare()
            hidden = self.model(self._views(num_rows, 0), self.kv_cache)
            self.model.logits(hidden, out=self._logits[:num_rows])
            sample(self._logits[:num_rows])

        return self._pool.record(f"a step of {num_rows} decodes", step)


class CapturedForward(_ReplayedForward):
    """Runs all steps from graphs, captured beforehand for each of the ascending ``sizes`` and ``row_sizes``.

    Each batch has one of the ``sizes``. Rows are padded here; the batch points unused rows at the first token. Graphs
    of logits end with ``sample``.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: PagedKVCache,
        pool: GraphPool,
        views: Views,
        results: Results,
        *,
        sizes: Sequence[int],
        row_sizes: Sequence[int],
        sample: Sample,
    ):
        super().__init__(model, kv_cache, pool, views, results, max_tokens=sizes[-1], max_rows=row_sizes[-1])
        self._sizes, self._row_sizes, self._sample = sizes, row_sizes, sample

    def capture(self, progress: Callable[[int, int], None], trial: TrialBatch | None = None) -> None:
        """Captures every graph, the largest first, and calls ``progress`` with how many are done and how many there
        are.

        Each step runs before it is captured. On a GPU only the largest of each kind runs once more in its capture. The
        others' captures get what they launched, since calling the modules takes most of the time.
        With a ``trial`` each graph is replayed once on that batch, which also uploads it to the GPU, and compared with
        the step itself. What that finds is looked at when all are captured, so that the GPU computes while the host
        captures the next one. Raises :class:`CaptureError` where they differ.
        """
        total, tried = len(self._sizes) + len(self._row_sizes), dict[str, Tensor]()
        for size in reversed(self._sizes):
            num_used = 0 if trial is None else trial.fill(size)
            is_largest = size == self._sizes[-1]
            step = partial(self._forward_step, size)
            graph = self._pool.capture(f"a step of {size} tokens", step, runs_twice=is_largest)
            if trial is not None:
                tried[graph.name] = self._try(graph, self._hidden[:num_used])
            self._forwards[size] = graph
            progress(len(self._forwards), total)
        for num_rows in reversed(self._row_sizes):
            is_largest = num_rows == self._row_sizes[-1]
            step = partial(self._head_step, num_rows)
            graph = self._pool.capture(f"logits of {num_rows} rows", step, runs_twice=is_largest)
            if trial is not None:
                tried[graph.name] = self._try(graph, self._logits[:num_rows])
            self._heads[num_rows] = graph
            progress(len(self._forwards) + len(self._heads), total)
        different = [name for name, is_same in tried.items() if not is_same]
        if trial is not None:
            trial.clear()
        if different:
            raise CaptureError(f"{different[0]}: a replay gives other results than the step that was captured")

    def _try(self, graph: Graph, results: Tensor) -> Tensor:
        """Replays a graph whose step has just left these ``results``. Returns whether it gives the same, on the
        device."""
        expected = results.clone()
        results.fill_(torch.nan)
        graph.replay()
        tolerance = _TOLERANCES.get(self._hidden.dtype, _TOLERANCE)
        largest = expected.nan_to_num(0, 0, 0).abs().amax() if expected.numel() else expected.new_zeros(())
        is_close = (results - expected).abs() <= tolerance * largest
        return (is_close | (results == expected) | (results.isnan() & expected.isnan())).all()

    def _head_step(self, num_rows: int) -> None:
        super()._head_step(num_rows)
        self._sample(self._logits[:num_rows])

    def hidden(self, batch: RaggedBatch) -> Tensor:
        num_tokens = len(batch.input_ids)
        self._forwards[num_tokens].replay()
        return self._hidden[:num_tokens]

    def logits(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        num_rows = len(batch.logits_indices)
        if num_rows:
            self._heads[smallest_size(num_rows, self._row_sizes)].replay()
        return self._logits[:num_rows]

    def close(self) -> None:
        self._pool.close()
