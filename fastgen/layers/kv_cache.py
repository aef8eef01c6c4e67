"""The paged KV cache: tensors only. Who owns which block is the runtime's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.compile.backends.backend import Backend
from fastgen.compile.backends.paged_view import PagedView
from fastgen.compile.backends.reference import REFERENCE
from fastgen.compile.host.device import to_device
from fastgen.layers.ragged_batch import RaggedBatch


@dataclass(frozen=True)
class KVShape:
    """The shape of a token's entry in a layer's cache: ``num_heads`` keys of ``head_dim`` features, and as many values.

    With a ``latent_dim`` no values are kept: they are the first ``latent_dim`` features of the keys.
    """

    num_heads: int
    head_dim: int
    latent_dim: int | None = None

    @property
    def num_features(self) -> int:
        """Returns how many numbers a token leaves."""
        return self.num_heads * self.head_dim * (2 if self.latent_dim is None else 1)


@dataclass(frozen=True)
class LayerKVCache:
    """One layer's view: ``k [B, P, K, D]``, ``v [B, P, K, Dv]`` and the KV group whose block table addresses them."""

    k: Tensor
    v: Tensor
    group: int

    def view(self, batch: RaggedBatch) -> PagedView:
        """Returns the cache as attention sees it in the step of ``batch``."""
        slots, tables = batch.slot_mapping[self.group], batch.block_tables[self.group]
        return PagedView(self.k, self.v, slots, tables, batch.cu_seqlens_q, batch.seq_lens)


def storage_places(groups: Sequence[int], shapes: Sequence[KVShape]) -> list[tuple[KVShape, int]]:
    """Returns for each layer which storage it uses: its shape, and how many layers of its group stand before it.

    ``groups[i]`` is the KV group of layer ``i``, ``shapes[group]`` what its layers keep. A block id belongs to one
    group at a time, so the n-th layers of all groups of one shape share a storage.
    """
    return [(shapes[group], list(groups[:layer]).count(group)) for layer, group in enumerate(groups)]


class PagedKVCache:
    """Keys and values of every layer in blocks of ``P`` tokens; see :func:`storage_places`.

    The ``backend`` that reads them says how they lie in memory.
    """

    def __init__(
        self,
        groups: Sequence[int],
        shapes: Sequence[KVShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend = REFERENCE,
    ):
        def storage(shape: KVShape) -> tuple[Tensor, Tensor]:
            sizes = (num_blocks, block_size, shape.num_heads, shape.head_dim, shape.latent_dim)
            return backend.kv_storage(*sizes, dtype=dtype, device=device)

        places = storage_places(groups, shapes)
        storages = {place: storage(place[0]) for place in dict.fromkeys(places)}
        self.storage = list(storages.values())
        self.layers = [LayerKVCache(*storages[place], group) for place, group in zip(places, groups, strict=True)]
        self.size_bytes = sum(shape.num_features for shape, _ in storages) * num_blocks * block_size * dtype.itemsize

    def touch(self) -> None:
        """Writes all of the memory once. The system gives a page when it is first written, which takes milliseconds
        that a step would otherwise spend, in every layer at once.
        """
        for pair in self.storage:
            for tensor in pair:
                tensor.zero_()

    def copy_blocks(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies block ``sources[i]`` to block ``destinations[i]``, in every layer of ``group``.

        All are read before any is written, so a block may be the source of one copy and the destination of another.
        """
        device = self.layers[0].k.device
        of, to = (to_device(torch.tensor(block_ids), device) for block_ids in (sources, destinations))
        for layer in self.layers:
            if layer.group == group:
                values_in_keys = layer.v.data_ptr() == layer.k.data_ptr()
                for tensor in (layer.k,) if values_in_keys else (layer.k, layer.v):
                    tensor.index_copy_(0, to, tensor.index_select(0, of))
