"""Errors of kernels, with a standalone script that reproduces the failure: without fastgen, with the source inlined."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fastgen.compile.build.builder import BuildFailure
from fastgen.compile.build.cache import KernelCache, cache_of
from fastgen.compile.render import SUFFIXES, render_text
from fastgen.compile.spec import KernelSpec
from fastgen.errors import KernelError


def script(kind: str, spec: KernelSpec, source: Path, **context: Any) -> str:
    """Returns the script of template ``reproduce/<kind>``: ``build_cpp``, ``launch_triton`` …, for the kernel in
    ``source``.
    """
    text = repr(source.read_text(encoding="utf-8"))
    file, module = repr(source.name), repr(source.stem)
    return render_text(f"reproduce/{kind}.py.j2", name=spec.name, source=text, file=file, module=module, **context)


def build_error(spec: KernelSpec, source: str, failure: BuildFailure, cache: KernelCache) -> KernelError:
    """Returns the error for a source that does not compile. Source, log and script go to the cache's
    ``failed`` folder.
    """
    message = f"kernel {spec.name} cannot be built: {failure}"
    return _error(message, spec, cache, {"source": source, "log.txt": failure.log, "reproduce.py": failure.script})


def launch_error(spec: KernelSpec, source: Path, arguments: Sequence[Any], error: Exception, text: str) -> KernelError:
    """Returns the error for a launch that failed with ``error``; ``text`` is the script."""
    names = [declared.name for declared in spec.arguments]
    given = ", ".join(f"{name}: {_describe(value)}" for name, value in zip(names, arguments, strict=False))
    if len(names) != len(arguments):
        given = f"{len(arguments)} arguments instead of {len(names)}"
    message = f"kernel {spec.name} cannot run on ({given}): {error}"
    return _error(message, spec, cache_of(source), {"source": source.read_text(encoding="utf-8"), "reproduce.py": text})


def _error(message: str, spec: KernelSpec, cache: KernelCache, files: Mapping[str, str]) -> KernelError:
    """Keeps ``files`` if possible; a full disk must not hide the error."""
    source, reproducer = None, None
    with contextlib.suppress(OSError):
        place = cache.failed(spec.name)
        for name, text in files.items():
            file = place / (f"{spec.name}{SUFFIXES[spec.target]}" if name == "source" else name)
            file.write_text(text, encoding="utf-8")
        source, reproducer = str(place / f"{spec.name}{SUFFIXES[spec.target]}"), str(place / "reproduce.py")
    return KernelError(
        message, kernel=spec.name, spec=str(spec), nodes=spec.needed_by, file=source, reproducer=reproducer
    )


def made_up(arguments: Sequence[Any]) -> str:
    """Returns Python code for arguments like these: tensors of the same shape, stride, dtype and device."""
    return ", ".join(
        f"tensor({tuple(each.shape)}, {each.stride()}, {each.dtype}, {str(each.device)!r})"
        if isinstance(each, Tensor)
        else repr(each)
        for each in arguments
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        aligned = "" if value.data_ptr() % 16 == 0 else ", unaligned"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}{aligned}"
    return repr(value)
