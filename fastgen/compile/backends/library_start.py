"""Lets the library that torch calls load its kernels beside other work.

A library loads a kernel when a product first needs it, and which one that is depends on the product's sizes. On an H200
that takes 10 to 60 ms for each size of more than 64 rows, more than half of the time to capture a model's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import nn

from fastgen.compile.backends.modules.triton import Head, Linear


def library_products(model: nn.Module, sizes: Sequence[int], row_sizes: Sequence[int]) -> list[Callable[[], None]]:
    """Returns what computes each product once that the library has in steps of ``sizes`` tokens, of which
    ``row_sizes`` need logits. Layers of the same sizes have the same products."""
    found: dict[object, Callable[[], None]] = {}
    for module in model.modules():
        if isinstance(module, (Linear, Head)):
            for num_rows in row_sizes if isinstance(module, Head) else sizes:
                start = module.library_product(num_rows)
                if start is not None:
                    found.setdefault((module.library_key, num_rows), start)
    return list(found.values())


@contextmanager
def started_beside(products: Sequence[Callable[[], None]], device: torch.device) -> Iterator[None]:
    """Computes ``products`` on the GPU ``device``, by another thread, while the block runs. Afterwards it waits for
    them and gives their memory back. Raises what a product raises, unless the block has raised something.
    """

    def compute() -> None:
        with torch.inference_mode(), torch.cuda.device(device):
            for product in products:
                product()
            torch.cuda.synchronize(device)

    with ThreadPoolExecutor(1, thread_name_prefix="fastgen-library") as thread:
        computed = thread.submit(compute)
        yield
        computed.result()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
