"""The names under which clients may call a server without API keys on this machine.

A web page whose name is made to mean 127.0.0.1 after it was loaded (DNS rebinding) is of the same origin as such a
server. So the browser lets it send requests and read the answers. The ``Host`` field then has the page's name.
"""

from __future__ import annotations

import ipaddress
import logging
import re

from fastgen.serving.api_keys import API_KEY_VARIABLE
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import ForbiddenError

_log = logging.getLogger(__name__)
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")


class Hosts:
    """Checks the ``Host`` field of requests: if ``--allow-host`` is given, and without API keys on a loopback address.

    ``address`` is the one that the server listens at, in numbers: ``options.host`` has many spellings of it.
    ``localhost`` and addresses in numbers are always taken, since no page of another machine can have such a name, and
    so is ``options.host``.
    """

    def __init__(self, options: ServeOptions, address: str):
        self._names = {_spelled(name) for name in (*options.allow_hosts, options.host)} - {""}
        is_checked = bool(options.allow_hosts) or (not options.api_keys and _is_loopback(address))
        self._is_checked = is_checked and "*" not in self._names

    def check(self, host: str | None) -> None:
        """Raises ``ForbiddenError`` if requests for ``host`` are not taken. Old clients of HTTP/1.0 send none."""
        if not self._is_checked or host is None:
            return
        found = _HOST.fullmatch(host.strip())
        name = _spelled(found[1]) if found is not None else ""
        if name not in self._names and not _is_here(name):
            raise ForbiddenError(
                f"this server takes requests for localhost only, not for {host[:200]!r}; --allow-host NAME adds a name"
            )


def warn_if_open(options: ServeOptions, address: str) -> None:
    """Logs a warning if other machines may use the server that listens at ``address`` without a key."""
    if not options.api_keys and not _is_loopback(address):
        _log.warning(
            "there is no API key, so every machine that reaches %s may use this server; --api-key-file FILE or %s sets "
            "one",
            options.host or "this one",
            API_KEY_VARIABLE,
        )


def _is_loopback(address: str) -> bool:
    """Returns whether only programs on this machine reach ``address``, which is in numbers."""
    return ipaddress.ip_address(address).is_loopback


def _spelled(name: str) -> str:
    """Returns ``name`` as names are compared: a dot at its end says only that it is whole."""
    return name.lower().rstrip(".")


def _is_here(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost") or _is_address(name.strip("[]"))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
