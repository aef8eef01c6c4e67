"""Ending a server from outside takes the token of its deployment, or an API key."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.refusals import UnauthorizedError


@dataclass(frozen=True)
class Ending:
    """The way to end a server from outside."""

    token: str = field(repr=False)
    keys: ApiKeys
    # Starts the end; running requests may finish.
    end: Callable[[], None]

    def check(self, key: str | None) -> None:
        """Raises ``UnauthorizedError`` if ``key`` is neither the token nor an API key."""
        if not hmac.compare_digest((key or "").encode("utf-8", "surrogateescape"), self.token.encode()):
            if not self.keys:
                raise UnauthorizedError(
                    "ending this server needs its token, which fastgen.client has on the server's own machine"
                )
            self.keys.check(key)

    def ask(self, key: str | None) -> None:
        """Ends the server if ``key`` is the token or an API key; otherwise raises ``UnauthorizedError``."""
        self.check(key)
        self.end()
