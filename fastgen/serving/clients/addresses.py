"""Addresses of servers, checked before anything is sent, and the certificates to trust there."""

from __future__ import annotations

import ssl
from urllib.parse import SplitResult, urlsplit

from fastgen.errors import InvalidArgumentError


def split_url(url: str) -> SplitResult:
    """Returns the parts of ``url``. Raises ``InvalidArgumentError`` if it is not one of HTTP."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that is no number, or too large
    except ValueError as error:
        raise InvalidArgumentError(f"{url} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable():
        raise InvalidArgumentError(f"{url!r} is not a URL of HTTP, such as http://127.0.0.1:8000")
    return parts


def trusting(certificate: str | None) -> ssl.SSLContext:
    """Returns the TLS context of a client that trusts the system's authorities, and the ``certificate`` in this file
    beside them.
    """
    context = ssl.create_default_context()
    if certificate is not None:
        context.load_verify_locations(certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate may be self-signed
    return context
