"""The C++ kernels by which rank 0 tells the others the tokens of steady decodes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastgen.compile.build.builder import Kernel
from fastgen.compile.spec import Argument, KernelSpec

_NEEDED_BY = ("tensor parallelism",)
_SIZES = tuple(Argument(name, "i64", "scalar") for name in ("max_rows", "max_updates"))


def tell_tokens_spec() -> KernelSpec:
    """Returns the kernel for :class:`TellTokensKernel`."""
    tokens = (Argument("token_ids", "i64", "in"), Argument("num_rows", "i64", "scalar"))
    arguments = (*tokens, Argument("mailbox", "i64", "out"), *_SIZES)
    return KernelSpec("tell_tokens", "cpp", {}, arguments, needed_by=_NEEDED_BY)


def hear_tokens_spec() -> KernelSpec:
    """Returns the kernel for :class:`HearTokensKernel`."""
    written = (("heard", "i64"), ("token_ids", "i64"), ("tables", "i32"), ("mailbox", "i64"), ("shared", "u8"))
    arguments = (*(Argument(name, dtype, "out") for name, dtype in written), *_SIZES)
    return KernelSpec("hear_tokens", "cpp", {}, arguments, needed_by=_NEEDED_BY)


class TellTokensKernel:
    """Tells the other ranks by a kernel of :func:`tell_tokens_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def __call__(self, token_ids: Tensor, mailbox: Tensor, max_rows: int, max_updates: int) -> None:
        """Tells ``token_ids``, i64 and at most ``max_rows``, through the words ``mailbox``; none tell the end."""
        self._kernel((), token_ids, len(token_ids), mailbox, max_rows, max_updates)


class HearTokensKernel:
    """Waits for what rank 0 tells, by a kernel of :func:`hear_tokens_spec`."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel

    def bind(
        self,
        heard: Tensor,
        token_ids: Tensor,
        tables: Tensor,
        mailbox: Tensor,
        shared: Tensor,
        max_rows: int,
        max_updates: int,
    ) -> Callable[[], None]:
        """Returns a wait for the message behind number ``heard[0]``, which becomes that message's.

        ``heard[1]`` becomes the number of its tokens, which are written to ``token_ids``: 0 where no more decodes
        follow, or the ranks that share the memory ``shared`` have ended. Entries of block tables that changed are
        written to the flat ``tables``, i32.
        """
        return self._kernel.bind((), heard, token_ids, tables, mailbox, shared, max_rows, max_updates)
