"""Panics of libraries in Rust, such as that of tokenizers, which no handler of errors expects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises ``RuntimeError`` in place of a panic in the block, which is no ``Exception``."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # each library has a class of its own, which it does not export
            raise
        raise RuntimeError(str(error)) from error
