"""Calls a function on a thread with a large stack, for code that recurses as deep as its input asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# llguidance takes up to 5 KiB for each schema or rule that leads to another. The longest format has room for some
# 20,000 of them. Memory of a stack is taken only as far as it is used.
STACK_BYTES = 256 << 20
# The size of new stacks is set for the whole process.
_size_lock = threading.Lock()
_Result = TypeVar("_Result")


def on_large_stack(function: Callable[[], _Result]) -> _Result:
    """Returns ``function()``, called on a thread of its own, or raises what it raises."""
    with ThreadPoolExecutor(1, "fastgen-format") as thread:
        with _size_lock:
            usual_bytes = threading.stack_size(STACK_BYTES)
            try:
                called = thread.submit(function)  # starts the thread
            finally:
                threading.stack_size(usual_bytes)
        return called.result()
