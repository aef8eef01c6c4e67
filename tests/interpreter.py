"""Makes launches of interpreted Triton kernels start sooner."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from triton.language import core
from triton.runtime import interpreter


@cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtin(package: Any, *how: Any) -> None:
    for name, member in _builtins(package):
        interpreter._patch_attr(package, name, member, *how)


def find_builtins_once() -> None:
    """Has Triton's interpreter find the functions of its language once, and not again in each launch, of which that
    takes a quarter. A launch replaces them and puts them back.
    """
    interpreter._patch_builtin = _patch_builtin
