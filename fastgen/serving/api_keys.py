"""API keys, which are compared in constant time and never logged."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from fastgen.errors import InvalidArgumentError
from fastgen.serving.refusals import UnauthorizedError

API_KEY_VARIABLE = "FASTGEN_API_KEY"


class ApiKeys:
    """Holds the valid keys. Without any key, requests need none."""

    def __init__(self, keys: Iterable[str] = ()):
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def load(cls, file: str | Path | None, environ: Mapping[str, str]) -> ApiKeys:
        """Returns the keys in ``file``, one a line, where ``#`` begins a comment, and the one in ``FASTGEN_API_KEY``.

        Raises ``InvalidArgumentError`` where the file has none, and for a key that no client could send."""
        keys = []
        if given := environ.get(API_KEY_VARIABLE):
            keys.append(sendable_key(given, API_KEY_VARIABLE))
        if file is not None:
            try:
                lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidArgumentError(f"cannot read the API keys in {file}: {error}") from error
            found = [
                sendable_key(key, f"{file}:{number}")
                for number, line in enumerate(lines, start=1)
                if (key := line.partition("#")[0].strip())
            ]
            if not found:
                raise InvalidArgumentError(f"{file} has no API key; write one a line, or leave the file out")
            keys += found
        return cls(keys)

    @property
    def digests(self) -> list[str]:
        """Returns the SHA-256 of each key, in hexadecimal digits."""
        return [digest.hex() for digest in self._digests]

    def with_digests(self, digests: Iterable[str]) -> ApiKeys:
        """Returns these keys and those with such :attr:`digests`."""
        keys = ApiKeys()
        keys._digests = [*self._digests, *map(bytes.fromhex, digests)]
        return keys

    def check(self, key: str | None) -> None:
        """Raises :class:`UnauthorizedError` where ``key`` is not valid, in a time that does not depend on ``key``."""
        if not self._digests:
            return
        given = _digest(key or "")
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if key is None:
            raise UnauthorizedError("an API key is needed: send 'Authorization: Bearer KEY'")
        if not any(matches):
            raise UnauthorizedError("this API key is not known")

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._digests)} keys)"


def bearer(authorization: str | None) -> str | None:
    """Returns the key in ``Bearer KEY``."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def sendable_key(text: str, where: str) -> str:
    """Returns the key in ``text``. Raises ``InvalidArgumentError`` where no client could put it into a header."""
    key = text.strip()
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise InvalidArgumentError(
            f"{where}: an API key must consist of visible ASCII characters without spaces, since it is sent in a header"
        )
    return key


def environment_without_keys() -> dict[str, str]:
    """Returns the environment of this process for the processes that it starts, without the key."""
    return {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
