"""A server without keys refuses web pages of other sites, and logs the address that a client really has."""

from __future__ import annotations

import json
import logging

import pytest

from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.options import ServeOptions
from tests.serving.local_server import Served, check, error_of

SITE = "https://a.example"


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/recording", ("sec-fetch-site: cross-site",), 403),
        ("/recording", ("sec-fetch-site: cross-site", f"origin: {SITE}"), 403),
        ("/metrics", ("sec-fetch-site: cross-site",), 403),
        ("/recording", ("sec-fetch-site: same-origin",), 200),
        ("/recording", ("sec-fetch-site: same-site",), 200),
        ("/recording", ("sec-fetch-site: none",), 200),
        ("/recording", (), 200),
        ("/", ("sec-fetch-site: cross-site",), 200),
        ("/health", ("sec-fetch-site: cross-site",), 200),
    ],
)
def test_pages_of_other_sites_reach_the_open_paths_alone(path: str, headers: tuple[str, ...], status: int) -> None:
    async def test(server: Served) -> None:
        found, _, body = await server.ask(get(path, *headers))
        assert found == status
        assert len(server.app.bodies) == (status == 200)
        if status == 403:
            assert "a page of another site sent this request" in error_of(body)
            assert "--allow-origin" in error_of(body)
            assert json.loads(body)["error"]["type"] == "permission_error"

    check(test)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (ServeOptions(port=0, allow_origins=(SITE,)), 200),
        (ServeOptions(port=0, allow_origins=("*",)), 200),
        (ServeOptions(port=0, allow_origins=("https://b.example",)), 403),
        (ServeOptions(port=0, api_keys=ApiKeys(["right"])), 200),
    ],
)
def test_pages_of_allowed_sites_and_with_a_key_are_answered(options: ServeOptions, status: int) -> None:
    async def test(server: Served) -> None:
        headers = ("sec-fetch-site: cross-site", f"origin: {SITE}", "authorization: Bearer right")
        assert (await server.ask(get("/recording", *headers)))[0] == status

    check(test, options)


def test_a_client_cannot_name_another_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Served) -> None:
        with caplog.at_level(logging.INFO, "fastgen.serving.requests"):
            assert (await server.ask(get("/echo", "x-forwarded-for: 10.1.2.3")))[0] == 200

    check(test, ServeOptions(port=0, log_requests=True))
    (record,) = [each for each in caplog.records if each.name == "fastgen.serving.requests"]
    assert vars(record)["facts"]["client"] == "127.0.0.1"
