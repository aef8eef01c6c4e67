"""The memory of a model, measured by building it on the ``meta`` device: weights, workspaces and intermediate results.

Most layers of a model differ only in the names of their tensors. So one layer of each kind is built, and counted as
often as the kind occurs. What a layer allocates also depends on the layer before it. So a step is recorded through a
few layers, among which are all pairs of kinds that follow each other in the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import cast

import torch
from torch import Tensor, nn

from fastgen.compile.backends.backend import Backend
from fastgen.compile.backends.choose import backend_for
from fastgen.compile.backends.model_ops import Ops
from fastgen.compile.backends.target import TargetFacts
from fastgen.compile.capture.allocations import META, Allocations, LinearAllocations, allocations_of
from fastgen.compile.spec import dtype_name
from fastgen.compile.weights.formats import QuantizedFormat
from fastgen.compile.weights.packed import PackedWeight, WeightFormat, matrix_format
from fastgen.compile.weights.quantized import QuantizedWeight
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.layers.rotary import Rotary
from fastgen.models.builder import build, kv_groups, kv_shapes, kv_windows
from fastgen.models.causal_lm import CausalLM
from fastgen.models.spec import ModelSpec, MoeSpec, NodeRef, TensorSpec

# The name of a row by the attribute ``weights`` of a module of a backend.
_ROWS = {"table": "tables", "matrix": "matrices"}
_BLOCK_SIZE = 16  # where sizes do not depend on it
# Numbers of tokens, or of rows, between which kernels' results are recorded: more than kernels for few rows take, which
# may compute two ops at once, and leave no result between them.
_MANY = (65, 66)


@dataclass(frozen=True)
class ModelBuild:
    """A model that is to be built: its ``spec``, ``dtype`` and ``target``, and the ``weight_format`` of its matrices if
    they are not in ``dtype``.
    """

    spec: ModelSpec
    dtype: torch.dtype
    target: TargetFacts
    weight_format: QuantizedFormat | None = None

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.target.activation_dtype(self.dtype)

    @property
    def matrix_format(self) -> WeightFormat | QuantizedFormat:
        """Returns the short name of the format of matrices."""
        return self.weight_format or matrix_format(cast(WeightFormat, dtype_name(self.dtype)), self.target.arch)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's weights. ``tables`` are the embedding, learned positions and the head, a tied one once;
    ``matrices`` the linear layers with their biases, scales and padding; ``norms`` all other parameters; ``rotary`` the
    tables of cosines and sines; ``page_rests`` the unused ends of the last huge pages of packed weights.
    """

    tables: int = 0
    matrices: int = 0
    norms: int = 0
    rotary: int = 0
    page_rests: int = 0

    def __add__(self, other: WeightBytes) -> WeightBytes:
        return WeightBytes(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def times(self, count: int) -> WeightBytes:
        return WeightBytes(*(count * each for each in _values(self)))


def _values(sizes: WeightBytes) -> Iterable[int]:
    return (getattr(sizes, each.name) for each in fields(sizes))


class MeasuredModel:
    """A model that is built as ``build`` says, described on the ``meta`` device."""

    def __init__(self, build: ModelBuild):
        self.build = build
        self._kinds = [_kind(layer.branches) for layer in build.spec.layers]
        self._kept = _kept_layers(self._kinds)
        layers, firsts = build.spec.layers, [self._kinds.index(kind) for kind in dict.fromkeys(self._kinds)]
        self._few_layers = replace(build.spec, layers=tuple(layers[index] for index in self._kept))
        self._one_of_each_kind = replace(build.spec, layers=tuple(layers[index] for index in firsts))
        # A model and a step of each size is asked for many times while sizes that fit are looked for.
        self.model = lru_cache(maxsize=64)(self._model)
        self.ops = lru_cache(maxsize=64)(self._ops)
        self._recorded = lru_cache(maxsize=256)(self._record)
        self._lines_of_blocks = lru_cache(maxsize=64)(self._line_of_blocks)

    @cached_property
    def weights(self) -> WeightBytes:
        """Returns the bytes of all layers; ``rotary`` is for one position."""
        model = self.model()
        counts = Counter(self._kinds)
        sizes = weight_bytes(module for name, module in model.named_children() if name != "layers")
        seen: set[Hashable] = set()
        for index, layer in zip(self._kept, model.layers, strict=True):
            kind = self._kinds[index]
            if kind not in seen:
                seen.add(kind)
                sizes += weight_bytes([layer]).times(counts[kind])
        return replace(sizes, rotary=weight_bytes([model]).rotary)

    @cached_property
    def largest_tensor_bytes(self) -> int:
        """Returns the bytes of the checkpoint's largest tensor in the model's dtype."""
        most = max(math.prod(tensor.stored_shape) for tensor in self.build.spec.tensors())
        return most * self.build.dtype.itemsize

    def forward(self, num_tokens: int, length: int, block_size: int) -> Allocations:
        """Returns what the modules allocate in a step of ``num_tokens`` tokens, of sequences of up to ``length`` in
        blocks of ``block_size``.
        """
        if self.runs_kernels:  # they allocate results for the step's tokens and nothing else
            if num_tokens < _MANY[0]:
                return self._recorded(num_tokens, num_tokens, _BLOCK_SIZE)
            return self._line_of_tokens(num_tokens)
        windows = [each for each in kv_windows(self.build.spec) if each is not None]
        if not windows and length % block_size == 0 and length >= num_tokens:
            return self._lines_of_blocks(num_tokens, block_size)(length // block_size)
        num_new = min(num_tokens, length)
        lengths = {length, *(_longest_seen(length, window, num_new, block_size) for window in windows)}
        found = [self._recorded(num_tokens, each, block_size) for each in lengths]
        return max(found, key=lambda each: each.peak_bytes)

    def head(self, num_rows: int) -> Allocations:
        """Returns what the head allocates for ``num_rows`` rows in a step that is captured, beside the logits."""
        return self._captured_head(num_rows)

    def logits(self, num_rows: int) -> Allocations:
        """Returns what the head allocates for ``num_rows`` rows, the logits included."""
        return self._head(num_rows)

    @cached_property
    def _captured_head(self) -> LinearAllocations:
        model = self.model()

        def record(num_rows: int) -> Allocations:
            hidden, out = self._hidden(num_rows), torch.empty(num_rows, self.build.spec.vocab_size, device=META)
            return allocations_of(lambda: model.logits(hidden.new_empty(hidden.shape), out=out))

        return LinearAllocations.through(record, *_MANY)

    @cached_property
    def _head(self) -> LinearAllocations:
        model = self.model()

        def record(num_rows: int) -> Allocations:
            hidden = self._hidden(num_rows)
            return allocations_of(lambda: model.logits(hidden))

        return LinearAllocations.through(record, *_MANY)

    def _hidden(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self.build.spec.hidden_size, dtype=self.build.activation_dtype, device=META)

    @property
    def runs_kernels(self) -> bool:
        return self.build.target.has_kernels

    @cached_property
    def _line_of_tokens(self) -> LinearAllocations:
        return LinearAllocations.through(lambda count: self._record(count, count, _BLOCK_SIZE), *_MANY)

    def _line_of_blocks(self, num_tokens: int, block_size: int) -> LinearAllocations:
        """Returns what a chunk takes at the end of a sequence that fills any number of blocks."""
        least = -(-num_tokens // block_size)
        record = partial(self._record_blocks, num_tokens, block_size)
        return LinearAllocations.through(record, least, least + 1)

    def _record_blocks(self, num_tokens: int, block_size: int, num_blocks: int) -> Allocations:
        return self._record(num_tokens, num_blocks * block_size, block_size)

    def _record(self, num_tokens: int, length: int, block_size: int) -> Allocations:
        spec, model = self._few_layers, self.model(block_size=block_size)
        kv_cache = PagedKVCache(
            kv_groups(spec),
            kv_shapes(spec),
            num_blocks=1,
            block_size=block_size,
            dtype=self.build.dtype,
            device=META,
            backend=self.backend(),
        )
        batch = _batch(num_tokens, length, block_size, len(kv_shapes(spec)), reads_lengths=not self.runs_kernels)
        return allocations_of(lambda: model(batch, kv_cache))

    def backend(self, max_rows: int = 0, max_num_seqs: int = 0) -> Backend:
        """Returns the model's backend, which builds no kernels."""
        return backend_for(self.build.target, max_rows=max_rows, max_num_seqs=max_num_seqs)

    def _ops(self, max_rows: int, max_num_seqs: int, block_size: int, max_model_len: int = 1) -> Ops:
        """Returns ops with workspaces for steps of these sizes."""
        return self._model(max_rows, max_num_seqs, block_size, max_model_len, self._one_of_each_kind).ops

    def _model(
        self,
        max_rows: int = _MANY[-1],
        max_num_seqs: int = 1,
        block_size: int = _BLOCK_SIZE,
        max_model_len: int = 1,
        spec: ModelSpec | None = None,
    ) -> CausalLM:
        model, _ = build(
            spec or self._few_layers,
            dtype=self.build.dtype,
            device=META,
            max_model_len=max_model_len,
            block_size=block_size,
            backend=self.backend(max_rows, max_num_seqs),
            weight_format=self.build.weight_format,
        )
        return model


@lru_cache(
    maxsize=8
)  # programs load the same model again and again, to try sizes or for one piece of work after another
def measured(build: ModelBuild) -> MeasuredModel:
    """Returns the model that is built as ``build`` says, with all that was measured of it before in this process."""
    return MeasuredModel(build)


def _kind(node: object) -> Hashable:
    """Returns everything in a part of a spec that its memory depends on: sizes, but no names."""
    match node:
        case TensorSpec():
            return node.shape
        case NodeRef() | None:
            return None
        case MoeSpec():  # experts are alike
            others = (node.router, node.shared, node.shared_gate)
            return len(node.experts), _kind(node.experts[0]), _kind(others)
        case tuple():
            return tuple(map(_kind, node))
    if is_dataclass(node):
        return type(node), *(_kind(getattr(node, each.name)) for each in fields(node))
    assert isinstance(node, Hashable)
    return node


def _kept_layers(kinds: list[Hashable]) -> list[int]:
    """Returns a few layers with all pairs of kinds that follow each other in ``kinds``."""
    kept: set[int] = set()
    seen: set[Hashable] = set()
    for index, pair in enumerate(zip([None, *kinds], kinds, strict=False)):
        if pair not in seen:
            seen.add(pair)
            kept |= {max(0, index - 1), index}
    return sorted(kept)


def _longest_seen(length: int, window: int, num_new: int, block_size: int) -> int:
    """Returns the length up to ``length`` at which ``num_new`` new tokens see most keys, in blocks that begin before
    the window does.
    """
    surplus = (length - num_new - window + 2) % block_size
    return max(num_new, length - surplus) if length > num_new + window else length


def _batch(num_tokens: int, length: int, block_size: int, num_groups: int, *, reads_lengths: bool) -> RaggedBatch:
    """Returns the batch of a chunk of ``num_tokens`` tokens, or as many as a sequence of ``length`` has, and padding.
    Lengths are on the host if the modules read them.
    """

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    starts, lengths = torch.tensor([0, min(num_tokens, length)], dtype=torch.int32), torch.tensor([length])
    return RaggedBatch(
        input_ids=numbers(num_tokens),
        token_source=numbers(num_tokens),
        positions=numbers(num_tokens),
        slot_mapping=numbers(num_groups, num_tokens, dtype=torch.int64),
        cu_seqlens_q=starts if reads_lengths else starts.to(META),
        seq_lens=lengths if reads_lengths else lengths.to(META, torch.int32),
        block_tables=numbers(num_groups, 1, -(-length // block_size)),
        logits_indices=numbers(0),
        sampled_ids=numbers(1),
    )


def weight_bytes(modules: Iterable[nn.Module]) -> WeightBytes:
    """Returns the bytes of the weights of ``modules``, each of their modules counted once."""
    sizes = dict.fromkeys((each.name for each in fields(WeightBytes)), 0)
    for module in dict.fromkeys(inner for outer in modules for inner in outer.modules()):
        row = "rotary" if isinstance(module, Rotary) else _ROWS.get(getattr(module, "weights", ""), "norms")
        weights = [*module._parameters.values(), *module._buffers.values()]
        sizes[row] += _bytes(each for each in weights if each is not None)
        for weight in vars(module).values():
            if isinstance(weight, PackedWeight | QuantizedWeight):
                sizes[row] += weight.size_bytes
            if isinstance(weight, PackedWeight):
                sizes["page_rests"] += weight.page_rest_bytes
    return WeightBytes(**sizes)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)
