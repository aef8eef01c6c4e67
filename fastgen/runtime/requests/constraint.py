"""The tokens that a request's ``response_format`` allows next, as requests and samplers see it.

:mod:`fastgen.runtime.sampling.structured_output` implements these protocols.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# ``[⌈V/32⌉]``: bit ``i % 32`` of word ``i // 32`` says whether token ``i`` is allowed.
Mask = NDArray[np.int32]


class Matcher(Protocol):
    """Follows one sequence through the grammar of its answer."""

    @property
    def is_complete(self) -> bool:
        """Returns whether nothing can follow the tokens so far."""
        ...

    @property
    def is_late(self) -> bool:
        """Returns whether the present step leaves the sequence out, because its mask was not ready."""
        ...

    @property
    def error(self) -> str:
        """Returns why no token is allowed any more, if the grammar's library gave up; empty otherwise."""
        ...

    def prepare(self) -> None:
        """Starts to compute the mask of the next token on another thread, unless that has started."""
        ...

    def drop(self) -> None:
        """Ends the computation of a mask that has not begun: the sequence has ended."""
        ...

    def is_ready(self, deadline_s: float) -> bool:
        """Waits for the mask until ``deadline_s`` of ``time.monotonic``, unless the last one took long. Returns whether
        it is there. If not, the sequence is late until the next call.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Waits for the mask for at most ``timeout_s`` seconds."""
        ...

    def mask(self) -> Mask:
        """Returns the tokens that may come next; waits for them. Every token, for a sequence that is late."""
        ...

    def advance(self, token_id: int) -> bool:
        """Takes the next token, which the mask allows. Returns whether the answer is known to be complete."""
        ...


class Constraint(Protocol):
    """A request's compiled format."""

    def matcher(self) -> Matcher:
        """Returns the matcher of a sequence that has no token yet."""
        ...
