"""The flight recording of a server, for ``fastgen why``."""

from __future__ import annotations

import asyncio

from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.flight.recording_file import parse_recording
from fastgen.serving.clients.connect import find_server
from fastgen.serving.extra import need_extra


def fetch_recordings(server: str, request_id: str, *, api_key: str | None) -> list[tuple[Recording, list[str]]]:
    """Returns the recording of each engine that answered a prompt of the request ``request_id``, and the numbers that
    its prompts have in it. ``server`` is an address, or the name of a server on this machine.

    Raises ``FastgenError`` if the server does not answer, refuses the key, or no longer has a record of the request.
    """
    need_extra()
    from fastgen.serving.clients.http import HttpTransport

    found = find_server(server)
    address, certificate = (found, None) if isinstance(found, str) else (found.address, found.certificate)

    async def fetch() -> list[tuple[bytes, list[str]]]:
        transport = HttpTransport(address, api_key, certificate)
        try:
            return await transport.recordings(request_id)
        finally:
            await transport.close()

    return [(parse_recording(data, address), numbers) for data, numbers in asyncio.run(fetch())]
