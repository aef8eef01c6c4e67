"""Who may end a server from outside: whoever has the token of its deployment, or an API key."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.refusals import UnauthorizedError


@dataclass(frozen=True)
class Ending:
    """How a server is asked to end."""

    token: str = field(repr=False)
    keys: ApiKeys
    # Requests that run may finish.
    end: Callable[[], None]

    def ask(self, key: str | None) -> None:
        """End the server, for who has a right to it; raises ``UnauthorizedError`` for others."""
        if not hmac.compare_digest((key or "").encode("utf-8", "surrogateescape"), self.token.encode()):
            if not self.keys:
                raise UnauthorizedError(
                    "ending this server needs its token, which fastgen.client has on the server's own machine"
                )
            self.keys.check(key)
        self.end()
