"""API keys, and the token that ends a deployment. They are compared in constant time, and never logged."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from fastgen.errors import InvalidArgumentError
from fastgen.serving.refusals import UnauthorizedError

KEY_VARIABLE = "FASTGEN_API_KEY"


class ApiKeys:
    """The keys that a server takes; without any it takes every request."""

    def __init__(self, keys: Iterable[str] = ()):
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, file: str | Path | None, environ: Mapping[str, str]) -> ApiKeys:
        """Those of ``file``, one a line (blank lines and what begins with ``#`` aside), and that of
        ``FASTGEN_API_KEY``. Raises ``InvalidArgumentError`` where the file cannot be read or has none."""
        keys = [key] if (key := environ.get(KEY_VARIABLE, "").strip()) else []
        if file is not None:
            try:
                lines = [line.strip() for line in Path(file).read_text().splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidArgumentError(f"api_key_file={str(file)!r} cannot be read: {error}") from None
            of_file = [line for line in lines if line and not line.startswith("#")]
            if not of_file:
                raise InvalidArgumentError(f"api_key_file={str(file)!r} has no key in it, one a line")
            keys += of_file
        return cls(keys)

    def check(self, key: str | None) -> None:
        """Raise ``UnauthorizedError`` unless ``key`` is one of them, or none is needed."""
        if self._digests and not self._holds(key):
            raise UnauthorizedError(
                "this server needs an API key, as 'authorization: Bearer KEY'"
                + ("" if key is None else "; the one given is not known")
            )

    def check_ending(self, key: str | None, token: str) -> None:
        """Raise ``UnauthorizedError`` unless ``key`` is one of them, or the deployment's ``token``."""
        is_token = key is not None and hmac.compare_digest(_digest(key), _digest(token))
        if not (is_token or self._holds(key)):
            raise UnauthorizedError(
                "ending this server needs its token, which a client on its machine has, or an API key"
            )

    def _holds(self, key: str | None) -> bool:
        if key is None:
            return False
        digest, found = _digest(key), False
        for own in self._digests:
            found |= hmac.compare_digest(own, digest)
        return found


def bearer(header: str | None) -> str | None:
    """The token of an ``authorization`` header, where it has one."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()  # of one length, whatever the key's
