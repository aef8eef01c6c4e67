"""The errors that fastgen raises on purpose. A message says what is wrong, where, and what to do about it.

All derive from :class:`FastgenError`; errors about a bad argument are also ``ValueError``.
"""

from __future__ import annotations

import shlex


class FastgenError(Exception):
    """Base class of all errors raised by fastgen."""


class InvalidArgumentError(FastgenError, ValueError):
    """An argument is unknown, out of range, or cannot be honoured."""


class PromptTooLongError(InvalidArgumentError):
    """A text has more tokens than the context of the model."""


class RequestTooLargeError(InvalidArgumentError):
    """A request can never be served with this configuration; the message holds the arithmetic.

    ``room`` is the largest ``max_new_tokens`` that would fit; below 1 if the prompt alone is too long.
    """

    def __init__(self, message: str, *, room: int = 0):
        super().__init__(message)
        self.room = room


class RecipeError(FastgenError):
    """A recipe is wrong. The message starts with ``file:line: node:`` where these are known.

    Attributes: ``file`` and ``line`` (1-based) locate the mistake, ``node`` is the dotted path inside the recipe;
    each is ``None`` where it does not apply.
    """

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None, node: str | None = None):
        self.message, self.file, self.line, self.node = message, file, line, node
        where = ":".join(str(part) for part in (file, line) if part is not None)
        super().__init__(": ".join(part for part in (where, node, message) if part))


class UnknownArchitectureError(FastgenError):
    """No recipe claims the checkpoint's architecture."""


class ModelNotFoundError(FastgenError):
    """A model is neither a directory, nor a built-in, nor a hub repository that can be reached or is cached."""


class CheckpointError(FastgenError):
    """A checkpoint's files are missing, damaged, or do not fit the model."""


class OutOfMemoryError(FastgenError):
    """The configuration does not fit into the device's memory; the message holds the arithmetic."""


class GenerationError(FastgenError):
    """A request failed while it ran (for example its logits became NaN)."""


class KernelError(FastgenError):
    """A generated kernel could not be built, loaded or launched.

    Attributes: ``kernel`` is its name, ``spec`` describes its specialisation, ``nodes`` are the recipe nodes that need
    it, ``file`` is its source, and ``reproducer`` is a script that fails in the same way. Each is empty or ``None``
    where it is unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str = "",
        spec: str = "",
        nodes: tuple[str, ...] = (),
        file: str | None = None,
        reproducer: str | None = None,
    ):
        self.kernel, self.spec, self.nodes, self.file, self.reproducer = kernel, spec, nodes, file, reproducer
        lines = [message]
        lines += [f"  kernel: {spec}"] if spec else []
        lines += [f"  needed by: {', '.join(nodes)}"] if nodes else []
        lines += [f"  source: {file}"] if file else []
        lines += [f"  reproduce: python {shlex.quote(reproducer)}"] if reproducer else []
        super().__init__("\n".join(lines))


class CompilerNotFoundError(FastgenError):
    """This machine has no compiler for the ``cpp`` target."""


class CaptureError(FastgenError):
    """A step cannot be captured, because a replay would differ, or a captured step is replayed after it was closed."""


class RankError(FastgenError):
    """One of the processes that share a model ended or does not answer; the others ended too."""


class _FileError(FastgenError):
    """A file is wrong. The message starts with ``file:line:``."""

    def __init__(self, message: str, *, file: str, line: int | None = None):
        self.file, self.line = file, line
        super().__init__(f"{file}: {message}" if line is None else f"{file}:{line}: {message}")


class RecordingError(_FileError):
    """A flight recording cannot be read or written, or is not one. The message starts with ``file:line:``."""


class TraceError(_FileError, ValueError):
    """A trace of requests cannot be read, or a line of it is wrong. The message starts with ``file:line:``."""


class BundleError(FastgenError):
    """A sealed bundle of kernels is damaged, or is not for this machine, these versions or this model."""
