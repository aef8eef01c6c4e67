"""The page's files: complete, with their media types, closed to other sites, and legible."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
from starlette.types import ASGIApp

from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.http.app import create_app
from fastgen.serving.http.guard import Guard
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service
from tests.serving.live_views import live_views
from tests.serving.server_process import ServerProcess

FOLDER = files("fastgen.serving").joinpath("page")
FILES = {entry.name: entry.read_text() for entry in FOLDER.iterdir()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Elements(HTMLParser):
    """The start tags of a text with their attributes, and the text of its scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("script", "style"):
            self.inline += data

    def values(self, *names: str) -> list[str]:
        """Returns the values of the attributes with these names."""
        return [value for _, attributes in self.found for name, value in attributes.items() if value and name in names]


PAGE = Elements(FILES["index.html"])
IDS = PAGE.values("id")


def fetch(address: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(
        address, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, {name.lower(): value for name, value in response.headers.items()}, response.read()
    except urllib.error.HTTPError as error:
        return error.code, {name.lower(): value for name, value in error.headers.items()}, error.read()


def test_every_file_is_served_as_what_it_is(server: ServerProcess) -> None:
    places = {name: f"{server.address}/page/{name}" for name in FILES if name != "index.html"}
    places["index.html"] = f"{server.address}/"
    for name, place in places.items():
        status, headers, body = fetch(place)
        assert (status, body.decode()) == (200, FILES[name])
        assert headers["content-type"].partition(";")[0] == MEDIA_TYPES[name.rpartition(".")[2]]
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-cache")
        policy = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert set(policy.values()) == {"'none'", "'self'"}
        unchanged, again, nothing = fetch(place, if_none_match=headers["etag"])
        assert (unchanged, again["etag"], nothing) == (304, headers["etag"], b"")
        assert fetch(place, if_none_match='"another"')[0] == 200
    for nowhere in ("none.js", "index.html", "..%2f__init__.py"):
        assert fetch(f"{server.address}/page/{nowhere}")[0] == 404


def test_the_live_view_counts_what_is_served(server: ServerProcess) -> None:
    def look() -> dict[str, Any]:
        status, headers, body = fetch(f"{server.address}/live")
        assert (status, headers["content-type"], headers["cache-control"]) == (200, "application/json", "no-store")
        return json.loads(body)

    before, engines = look(), live_views(server.address)
    assert [before[name] for name in ("model", "state", "restarts", "has_chat_template")] == [
        "tiny-llama",
        "ready",
        0,
        True,
    ]
    body = {"model": "tiny-llama", "prompt": "Once upon a time", "max_tokens": 7, "ignore_eos": True}
    data = json.dumps(body).encode()
    urllib.request.urlopen(
        urllib.request.Request(f"{server.address}/v1/completions", data, {"content-type": "application/json"})
    ).close()
    look()
    # The one engine that answered, of a server with replicas.
    (replica,) = [
        replica
        for replica, view in live_views(server.address).items()
        if view["num_requests"] != engines[replica]["num_requests"]
    ]
    after = live_views(server.address)[replica]
    assert after["num_requests"] == engines[replica]["num_requests"] + 1
    assert after["num_generated_tokens"] == engines[replica]["num_generated_tokens"] + 7
    assert (after["num_running"], after["num_waiting"], sum(after["blocks"]["held"])) == (0, 0, 0)
    number, num_prompt_tokens, num_answer_tokens, _, seconds = after["steps"][-1]
    assert (num_prompt_tokens, num_answer_tokens) == (0, 1)  # of the last of its tokens
    assert seconds > 0
    assert number == after["steps"][0][0] + len(after["steps"]) - 1
    assert 0 < after["gaps"]["p50_s"] <= after["gaps"]["p95_s"] <= after["gaps"]["p99_s"]


async def answer(app: ASGIApp, path: str, query: str = "", **headers: str) -> tuple[int, bytes]:
    """Returns the answer of ``app``, without a socket."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": raw}
    await app(scope | {"query_string": query.encode(), "http_version": "1.1", "scheme": "http"}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_files_are_for_all_and_the_live_view_for_those_with_a_key() -> None:
    async def run() -> None:
        service = Service({"model": "tiny-llama"})  # it is never started
        options = ServeOptions(api_keys=ApiKeys(["the key"]))
        app = Guard(create_app(service, options), options, service.metrics, "127.0.0.1")
        try:
            assert await answer(app, "/") == (200, FILES["index.html"].encode())
            assert await answer(app, "/page/app.js") == (200, FILES["app.js"].encode())
            assert (await answer(app, "/live"))[0] == 401
            assert (await answer(app, "/live", authorization="Bearer another"))[0] == 401
            status, body = await answer(app, "/live", authorization="Bearer the key")
            nothing_yet = {"model": "tiny-llama", "state": "starting", "restarts": 0, "has_chat_template": None}
            assert (status, json.loads(body)) == (200, nothing_yet | {"engine": None})
        finally:
            await service.stop()

    asyncio.run(run())


def test_no_file_names_another_host() -> None:
    for name, text in FILES.items():
        named = set(re.findall(r"[\w+.-]+://[^\s\"'<>)]*", text)) - {"http://www.w3.org/2000/svg"}
        assert named == set(), name
        assert not re.search(r"[\"'(=]//", text), f"{name}: an address without a scheme"
        assert not re.search(r"@import|\burl\(", text), name


def test_nothing_is_inline() -> None:
    assert PAGE.inline.strip() == ""
    tags = [tag for tag, _ in PAGE.found]
    assert "style" not in tags
    assert all(attributes.get("src") for tag, attributes in PAGE.found if tag == "script")
    names = {name for _, attributes in PAGE.found for name in attributes}
    assert not [name for name in names if name == "style" or name.startswith("on")]
    for name, script in SCRIPTS.items():  # what the policy would refuse
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|setAttribute\(.style", script
        ), name


def test_every_file_is_used_and_every_file_used_is_there() -> None:
    used = {place.removeprefix("page/") for place in PAGE.values("src", "href")}
    for script in SCRIPTS.values():
        used.update(
            name for pair in re.findall(r"from \"\./([^\"]+)\"|import \"\./([^\"]+)\"", script) for name in pair
        )
    assert used - {""} == FILES.keys() - {"index.html"}


def test_every_element_that_scripts_and_labels_name_is_in_the_page() -> None:
    assert len(IDS) == len(set(IDS))
    named = set(PAGE.values("for", "aria-controls", "aria-labelledby"))
    for script in SCRIPTS.values():
        named.update(re.findall(r"(?:byId|getElementById|ink)\(\"([\w-]+)\"\)", script))
        named.update(re.findall(r"\"((?:ink|view|gap)-[\w-]+)\"", script))
        for stem in re.findall(r"byId\(`([\w-]+)-\$\{name\}`\)", script):
            named.update(f"{stem}-{name}" for name in ("p50", "p95", "p99"))
    assert len(named) > 50
    assert named <= set(IDS), "not in index.html"


def test_every_field_and_button_has_a_name() -> None:
    labelled = set(PAGE.values("for"))
    for tag, attributes in PAGE.found:
        if tag in ("input", "textarea"):
            assert attributes["id"] in labelled
        if tag == "canvas":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
        if tag == "button":
            assert attributes["type"] in ("button", "submit")
    assert re.findall(r"<button[^>]*>\s*</button>", FILES["index.html"]) == []


THEMES = ("light", "dark")


def colours() -> Iterator[tuple[str, tuple[str, str]]]:
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", FILES["style.css"]):
        yield name, (light, dark)


def contrast(one: str, other: str) -> float:
    """Returns the contrast by WCAG 2.2."""

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    lights = sorted((luminance(one) + 0.05, luminance(other) + 0.05))
    return lights[1] / lights[0]


@pytest.mark.parametrize("theme", THEMES)
def test_texts_and_marks_stand_out(theme: str) -> None:
    palette: dict[str, Any] = {name: pair[THEMES.index(theme)] for name, pair in colours()}
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    texts = [("text", back) for back in ("page", "surface", "sunken", "mine")]
    texts += [("muted", back) for back in ("page", "surface", "sunken")]
    texts += [("on-accent", "accent"), ("wrong", "wrong-back"), ("wrong", "surface")]
    weak = {pair: contrast(palette[pair[0]], palette[pair[1]]) for pair in texts}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < 4.5} == {}
    marks = [(mark, "surface") for mark in ("edge", "accent", "prompts", "answers", "good", "busy", "wrong")]
    marks += [("held", "cached"), ("held", "free")]
    palette["held"] = palette["prompts"]
    weak = {pair: contrast(palette[pair[0]], palette[pair[1]]) for pair in marks}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < (2 if pair[0] == "held" else 3)} == {}


def test_every_colour_that_is_used_is_defined_for_both_themes() -> None:
    defined = set(re.findall(r"^  --([\w-]+):", FILES["style.css"], re.MULTILINE))
    assert set(re.findall(r"var\(--([\w-]+)\)", FILES["style.css"])) <= defined
    rules = FILES["style.css"].partition("\n}\n")[2]
    assert re.findall(r"#[0-9a-f]{3,8}\b", rules) == [], "a colour that only one theme has"
