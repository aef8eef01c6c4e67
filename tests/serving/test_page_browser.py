"""The page in headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastgen.models.checkpoint.builtins import BUILTINS
from tests.serving.server_process import ServerProcess, served

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
expect = playwright.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEY = "a-key-of-tests"
PHONE = {"width": 390, "height": 800}
STORY = "Tell me a story about a cat."


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """An open page, with its requests and its errors."""

    def __init__(self, context: Any, address: str):
        self.address, self.context = address, context
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address + "/")

    def setting(self, **values: object) -> None:
        if not self.page.is_visible("#settings"):
            self.page.click("#settings-button")
        for name, value in values.items():
            self.page.fill("#" + name.replace("_", "-"), str(value))
        self.page.click("#settings-button")

    def send(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def answer(self, place: int = -1) -> str:
        """Returns the text of an answer, once it has ended."""
        self.page.wait_for_selector(".message.assistant:not([aria-busy])", state="attached")
        self.page.wait_for_selector("#send-button", state="visible")
        answers = self.page.locator(".message.assistant .text").all_text_contents()
        return str(answers[place])

    def stats(self) -> str:
        return str(self.page.locator(".stats").last.text_content())

    @property
    def num_looks(self) -> int:
        """Returns how often the page has requested the engine's state."""
        return sum(url.endswith("/live") for url in self.asked)

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector))

    def colour(self, selector: str) -> str:
        return str(self.page.eval_on_selector(selector, "each => getComputedStyle(each).backgroundColor"))


Open = Callable[..., Any]


@pytest.fixture
def visit(chromium: Any) -> Iterator[Open]:
    """Opens pages, each in a context of its own. When the test ends, they asked no other host for anything and had
    nothing to complain of, but for what they were ``told`` by the server."""
    visits: list[tuple[Visit, tuple[str, ...]]] = []

    @contextmanager
    def opened(server: ServerProcess, *, told: tuple[str, ...] = (), **options: Any) -> Iterator[Visit]:
        context = chromium.new_context(**options)
        context.set_default_timeout(60_000)
        try:
            visits.append((Visit(context, server.address), told))
            yield visits[-1][0]
        finally:
            context.close()

    yield opened
    for each, told in visits:
        assert [url for url in each.asked if not url.startswith((each.address + "/", "data:"))] == []
        assert [words for words in each.complaints if not any(status in words for status in told)] == []


def ask(server: ServerProcess, path: str, body: object = None, key: str | None = None) -> Any:
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(server.address + path, data, headers)) as response:
        return json.load(response)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def greedy(server: ServerProcess, messages: list[dict[str, str]], max_tokens: int) -> Any:
    body = {"model": "tiny-llama", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    return ask(server, "/v1/chat/completions", body)


def test_a_conversation_is_that_of_the_api(server: ServerProcess, visit: Open) -> None:
    with visit(server) as it:
        it.setting(temperature=0, max_tokens=40)
        messages = [user(STORY)]
        for question in (STORY, "And then?"):
            expected = greedy(server, messages, 40)
            it.send(question)
            said = expected["choices"][0]["message"]["content"]
            assert it.answer() == said != ""
            tokens = expected["usage"]["completion_tokens"]
            assert re.fullmatch(
                rf"{tokens} tokens? · first token after [\d.]+ m?s · [\d.]+ tokens/s( · cut at max tokens)?", it.stats()
            )
            assert ("cut" in it.stats()) == (expected["choices"][0]["finish_reason"] == "length")
            messages += [assistant(said), user("And then?")]
        it.page.click("#new-button")
        assert it.page.locator(".message").count() == 0
        it.setting(system="You only know dogs.", top_p=0.5, seed=7)
        expected = greedy(server, [{"role": "system", "content": "You only know dogs."}, user(STORY)], 40)
        it.send(STORY)
        assert it.answer() == expected["choices"][0]["message"]["content"]


def test_seeds_and_temperatures_are_those_of_the_api(server: ServerProcess, visit: Open) -> None:
    with visit(server) as it:
        it.setting(temperature=1.5, max_tokens=30, top_p=0.9, seed=11)
        body = {"model": "tiny-llama", "messages": [user(STORY)], "max_tokens": 30}
        drawn = ask(server, "/v1/chat/completions", body | {"temperature": 1.5, "top_p": 0.9, "seed": 11})
        it.send(STORY)
        assert it.answer() == drawn["choices"][0]["message"]["content"]


# Inside the page, because all tokens may have come before a look from outside.
STOP_AT_ONCE = """by => new MutationObserver((_, observer) => {
    const message = document.querySelector(".message.assistant");
    if (!message?.querySelector(".text")?.textContent) return;
    observer.disconnect();
    window.seen = {
        busy: message.getAttribute("aria-busy"),
        canSend: document.querySelector("#send-button").checkVisibility(),
    };
    if (by === "button") document.querySelector("#stop-button").click();
    else document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
}).observe(document.body, {childList: true, subtree: true, characterData: true})"""


@pytest.mark.parametrize("by", ["button", "key"])
def test_a_stopped_answer_is_cancelled(server: ServerProcess, visit: Open, by: str) -> None:
    with visit(server) as it:

        def prolong(route: Any) -> None:
            slow = {"ignore_eos": True, "logprobs": True, "top_logprobs": 20, "frequency_penalty": 0.01}
            route.continue_(post_data=json.dumps(json.loads(route.request.post_data) | slow))

        it.page.route("**/v1/chat/completions", prolong)
        it.setting(max_tokens=1900)
        before = ask(server, "/live")["engine"]["num_generated_tokens"]
        it.page.evaluate(STOP_AT_ONCE, by)
        it.send(STORY)
        said = it.answer()
        assert it.page.evaluate("seen") == {"busy": "true", "canSend": False}
        assert it.stats().endswith("stopped")
        while (engine := ask(server, "/live")["engine"])["num_running"]:
            pass
        assert 0 < engine["num_generated_tokens"] - before < 1900
        assert sum(engine["blocks"]["held"]) == 0
        assert it.answer() == said
        expect(it.page.locator("#running")).to_have_text("0")
        it.page.unroute_all()
        it.setting(max_tokens=5, temperature=0)
        it.send("And now?")  # what was said so far is part of the conversation
        expected = greedy(server, [user(STORY), assistant(said), user("And now?")], 5)
        assert it.answer() == expected["choices"][0]["message"]["content"]


def test_a_refusal_is_told_in_words_and_nothing_is_lost(server: ServerProcess, visit: Open) -> None:
    with visit(server, told=("400",)) as it:
        it.setting(max_tokens=100_000)
        it.send(STORY)
        it.page.wait_for_selector(".error")
        assert "max_model_len" in it.text(".error") or "2048" in it.text(".error")
        assert it.page.get_attribute(".error", "role") == "alert"
        assert it.page.input_value("#prompt") == STORY
        it.setting(max_tokens=5, temperature=0)
        it.page.press("#prompt", "Enter")
        assert it.answer() == greedy(server, [user(STORY)], 5)["choices"][0]["message"]["content"]
        it.setting(temperature=5)
        it.send("again")
        assert it.page.is_visible("#settings")  # to be put right before anything is sent
        assert it.page.input_value("#prompt") == "again"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('data: {"choices": [{"delta": {"content": "Half"}}]}\n\n', "The connection ended before the answer did."),
        (
            'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
            'data: {"error": {"message": "the engine ended", "type": "server_error", "param": null, "code": null}}\n\n',
            "The engine ended.",
        ),
    ],
)
def test_an_answer_that_breaks_off_says_so(server: ServerProcess, visit: Open, body: str, words: str) -> None:
    with visit(server) as it:
        it.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
        )
        it.send(STORY)
        it.page.wait_for_selector(".error")
        assert it.answer() == "Half"
        assert it.text(".error") == words


def test_a_busy_or_missing_server_is_told_in_words(server: ServerProcess, visit: Open) -> None:
    with visit(server, told=("429", "ERR_FAILED")) as it:
        error = {"error": {"message": "64 requests wait", "type": "overloaded", "param": None, "code": None}}
        it.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=429, headers={"retry-after": "3"}, json=error),
        )
        it.send(STORY)
        it.page.wait_for_selector(".error")
        assert it.text(".error") == "The server cannot take this now. 64 requests wait. Try again in 3 s."
        it.page.unroute_all()
        it.page.route(re.compile("/v1/|/live"), lambda route: route.abort())
        it.page.press("#prompt", "Enter")
        expect(it.page.locator(".error")).to_have_count(2)
        assert "cannot be reached" in str(it.page.locator(".error").last.text_content())
        it.page.wait_for_selector("#state[data-state=unreachable]")
        it.page.unroute_all()
        it.page.wait_for_selector("#state[data-state=ready]")


def test_the_engine_is_shown_as_it_is(server: ServerProcess, visit: Open) -> None:
    with visit(server) as it:
        it.setting(max_tokens=30)
        it.send(STORY)
        it.answer()
        live = ask(server, "/live")
        engine = live["engine"]
        expect(it.page.locator("#requests")).to_have_text(f"{engine['num_requests']:,}")
        assert it.text("#state") == live["state"] == "ready"
        assert it.text("#model") == live["model"] == "tiny-llama"
        held, cached = sum(engine["blocks"]["held"]), sum(engine["blocks"]["cached"])
        numbers = {"running": 0, "waiting": 0, "restarts": live["restarts"], "preemptions": engine["num_preemptions"]}
        numbers |= {"blocks-held": held, "blocks-cached": cached, "budget": engine["token_budget"]}
        numbers["blocks-free"] = engine["blocks"]["num_blocks"] - held - cached
        assert {name: it.text(f"#{name}").replace(",", "") for name in numbers} == {
            name: str(number) for name, number in numbers.items()
        }
        for name in ("p50", "p95", "p99"):
            assert float(it.text(f"#gap-{name}").removesuffix(" ms")) == pytest.approx(
                1000 * engine["gaps"][f"{name}_s"], abs=0.51
            )
        for chart in ("steps", "gaps", "blocks"):
            colours = it.page.eval_on_selector(
                f"#{chart}-chart",
                """(canvas) => {
                    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                    return new Set(new Uint32Array(data.buffer)).size;
                }""",
            )
            assert colours >= 3, f"the {chart} chart is blank"
        label = str(it.page.get_attribute("#blocks-chart", "aria-label"))
        assert label == f"Of {engine['blocks']['num_blocks']} KV blocks {held} are held and {cached} cached"


@pytest.mark.parametrize("state", ["starting", "restarting", "draining", "failed"])
def test_a_server_that_is_not_ready_says_why(server: ServerProcess, visit: Open, state: str) -> None:
    with visit(server) as it:
        it.page.wait_for_selector("#state[data-state=ready]")
        assert not it.page.is_visible("#engine-note")
        nothing = {"model": "tiny-llama", "state": state, "restarts": 3, "has_chat_template": None, "engine": None}
        it.page.route("**/live", lambda route: route.fulfill(json=nothing))
        expect(it.page.locator("#state")).to_have_text(state)
        expect(it.page.locator("#restarts")).to_have_text("3")
        expect(it.page.locator("#engine-note")).to_be_visible()
        assert it.text("#engine-note").startswith("The ")
        it.page.unroute_all()
        expect(it.page.locator("#state")).to_have_text("ready")
        expect(it.page.locator("#engine-note")).to_be_hidden()


def test_it_looks_only_while_it_is_looked_at(server: ServerProcess, visit: Open) -> None:
    with visit(server) as it:
        it.page.clock.install()
        it.page.reload()
        it.page.wait_for_selector("#state[data-state=ready]")
        with it.page.expect_request("**/live"):
            it.page.clock.run_for(1000)
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        tell = "document.dispatchEvent(new Event('visibilitychange'))"
        it.page.evaluate(hide % "true" + tell)
        num_looks = it.num_looks
        for _ in range(5):
            it.page.clock.run_for(1000)
        with it.page.expect_request("**/live"):
            it.page.evaluate(hide % "false" + tell)
            it.page.clock.run_for(0)
        assert it.num_looks == num_looks + 1


def test_light_and_dark_are_the_systems_until_they_are_chosen(server: ServerProcess, visit: Open) -> None:
    backs = {}
    for scheme in ("light", "dark"):
        with visit(server, color_scheme=scheme) as it:
            backs[scheme] = it.colour("body")
    assert len(set(backs.values())) == 2
    with visit(server, color_scheme="light") as it:
        it.page.click("#theme")
        assert it.colour("body") == backs["dark"]
        it.page.reload()
        assert it.colour("body") == backs["dark"]
        it.page.click("#theme")
        assert it.colour("body") == backs["light"]


@pytest.mark.parametrize("size", [PHONE, {"width": 320, "height": 640}, {"width": 1280, "height": 860}])
def test_everything_fits_the_width(server: ServerProcess, visit: Open, size: dict[str, int]) -> None:
    beyond = """[...document.querySelectorAll('body *')]
        .filter((each) => each.checkVisibility() && each.getBoundingClientRect().right > innerWidth + 0.5)
        .map((each) => each.outerHTML.slice(0, 80))"""
    with visit(server, viewport=size) as it:
        it.setting(max_tokens=150, temperature=0)
        it.send("w" * 400)
        it.answer()
        note, composer = it.page.locator(".stats").last.bounding_box(), it.page.locator("#composer").bounding_box()
        assert note["y"] + note["height"] <= composer["y"], "the end of the answer is seen"
        it.page.click("#settings-button")
        assert it.page.evaluate(beyond) == []
        box = it.page.locator("#send-button").bounding_box()
        assert 0 < box["y"] < size["height"] - box["height"]
        it.page.click("#settings-button")
        if size["width"] < 900:
            assert not it.page.is_visible("#engine")
            it.page.click("#view-engine")
            assert not it.page.is_visible("#chat")
        assert it.page.is_visible("#blocks-chart")
        assert it.page.evaluate(beyond) == []
        assert it.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_keyboard_is_enough(server: ServerProcess, visit: Open) -> None:
    with visit(server) as it:
        it.page.wait_for_selector("#state[data-state=ready]")
        reached = []
        for _ in range(12):
            it.page.keyboard.press("Tab")
            reached.append(it.page.evaluate("document.activeElement.id"))
        places = [reached.index(name) for name in ("theme", "prompt", "settings-button", "new-button", "send-button")]
        assert places == sorted(places)
        it.page.focus("#settings-button")
        it.page.keyboard.press("Enter")
        assert it.page.get_attribute("#settings-button", "aria-expanded") == "true"
        it.page.fill("#max-tokens", "5")
        it.page.focus("#prompt")
        it.page.keyboard.type("one")
        it.page.keyboard.press("Shift+Enter")
        it.page.keyboard.type("two")
        it.page.keyboard.press("Enter")
        it.answer()
        assert it.text(".message.user .text") == "one\ntwo"
        assert it.text("#announcement") == "The answer is complete."
        assert it.page.get_attribute("#messages", "aria-live") == "polite"


def test_events_are_found_however_the_bytes_are_cut(server: ServerProcess, visit: Open) -> None:
    text = ': a comment\ndata: {"a": "ä€𝄞"}\n\nevent: x\r\ndata: one\r\ndata:two\r\n\r\n'
    text += "id: 1\n\ndata: last\r\rdata: not whole\n"
    script = """async ([text, cut]) => {
        const { events } = await import("/page/sse.js");
        const bytes = new TextEncoder().encode(text);
        const body = new ReadableStream({
            start(controller) {
                for (let at = 0; at < bytes.length; at += cut) controller.enqueue(bytes.slice(at, at + cut));
                controller.close();
            },
        });
        const found = [];
        for await (const data of events(body)) found.push(data);
        return found;
    }"""
    with visit(server) as it:
        for cut in (1, 2, 3, 5, 7, 1000):
            assert it.page.evaluate(script, [text, cut]) == ['{"a": "ä€𝄞"}', "one\ntwo", "last"]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that needs a key."""
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    with served("tiny-llama", "--api-key-file", str(file)) as process:
        yield process


def test_a_key_is_asked_for_and_kept_for_the_tab_only(locked: ServerProcess, visit: Open) -> None:
    with visit(locked, told=("401",)) as it:
        it.page.wait_for_selector("#key-dialog[open]")
        it.page.fill("#key-input", "no key at all")
        it.page.press("#key-input", "Enter")
        assert not it.page.evaluate("document.getElementById('key-input').checkValidity()")
        it.page.fill("#key-input", "not-the-key")
        it.page.press("#key-input", "Enter")
        expect(it.page.locator("#key-note")).to_contain_text("not accepted")
        it.page.fill("#key-input", KEY)
        it.page.press("#key-input", "Enter")
        it.page.wait_for_selector("#state[data-state=ready]")
        assert not it.page.is_visible("#key-dialog")
        stored = it.page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
        assert stored == [[KEY], [], ""]
        it.setting(max_tokens=5, temperature=0)
        it.send(STORY)
        body = {"model": "tiny-llama", "messages": [user(STORY)], "temperature": 0, "max_tokens": 5}
        expected = ask(locked, "/v1/chat/completions", body, KEY)
        assert it.answer() == expected["choices"][0]["message"]["content"]
        it.page.reload()
        it.page.wait_for_selector("#state[data-state=ready]")
        assert KEY not in "".join(it.asked)
        it.page.click("#settings-button")
        it.page.click("#key-button")
        it.page.wait_for_selector("#key-dialog[open]")
        assert it.page.evaluate("sessionStorage.length") == 0


def test_whoever_has_no_key_is_asked_once(locked: ServerProcess, visit: Open) -> None:
    with visit(locked, told=("401",)) as it:
        it.page.clock.install()
        it.page.reload()
        it.page.wait_for_selector("#key-dialog[open]")
        it.page.keyboard.press("Escape")
        it.page.wait_for_selector("#state[data-state='needs a key']")
        num_looks = it.num_looks
        it.page.clock.run_for(5000)
        assert not it.page.is_visible("#key-dialog")
        assert it.num_looks == num_looks
        it.page.click("#engine-note button")
        it.page.wait_for_selector("#key-dialog[open]")
        it.page.click("#key-cancel")
        it.send(STORY)
        it.page.wait_for_selector("#key-dialog[open]")
        it.page.click("#key-cancel")
        it.page.wait_for_selector(".error")
        assert it.text(".error") == "The server asks for a key, and was given none that it knows."
        assert it.page.input_value("#prompt") == STORY


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model without a chat template."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    shutil.copytree(Path(BUILTINS["tiny-llama"]), folder, ignore=shutil.ignore_patterns("*.jinja"))
    with served(str(folder)) as process:
        yield process


def test_a_model_without_a_chat_template_goes_on_with_the_text(plain: ServerProcess, visit: Open) -> None:
    with visit(plain) as it:
        it.page.wait_for_selector("#prompt[placeholder='Begin a text']")
        assert "no chat template" in it.text("#empty-note")
        it.setting(temperature=0, max_tokens=20)
        for prompt in ("Once upon a time", "There was a dog"):
            body = {"model": it.text("#model"), "prompt": prompt, "temperature": 0, "max_tokens": 20}
            it.send(prompt)
            it.page.wait_for_selector("#send-button", state="visible")
            assert it.answer() == ask(plain, "/v1/completions", body)["choices"][0]["text"] != ""


def test_of_several_replicas_one_is_looked_at(server: ServerProcess, visit: Open) -> None:
    live = ask(server, "/live")
    asked: list[str] = []

    def replica(name: str, state: str) -> dict[str, Any]:
        known = {"num_running": 2, "num_waiting": 1, "outstanding_tokens": 1234, "restarts": 5}
        return {"id": name, "host": f"host-{name}", "state": state, "num_blocks": 40, "num_held_blocks": 10, **known}

    replicas = [replica("a", "ready"), replica("b", "restarting")]

    def reply(route: Any) -> None:
        asked.append(route.request.url.partition("?")[2])
        wanted = asked[-1].removeprefix("replica=")
        shown = wanted if wanted in [one["id"] for one in replicas] else replicas[0]["id"]
        route.fulfill(json={**live, "replicas": replicas, "replica": shown})

    with visit(server, viewport=PHONE) as it:
        it.page.click("#view-engine")
        assert not it.page.is_visible("#replicas-panel")
        it.page.route("**/live*", reply)
        rows = it.page.locator("#replicas tr")
        expect(rows).to_have_count(2)
        assert it.text("#replicas-note") == "1 of 2 ready"
        cells = [cell.strip() for cell in rows.first.locator("td").all_text_contents()]
        assert cells == ["2", "1", "25 %", "1.2K", "5"]
        assert rows.nth(1).locator("small").text_content() == "restarting"
        buttons = it.page.locator("#replicas button")
        expect(buttons.first).to_have_attribute("aria-pressed", "true")
        buttons.nth(1).click()
        expect(buttons.nth(1)).to_have_attribute("aria-pressed", "true")
        assert asked[-1] == "replica=b"
        assert it.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        del replicas[1]  # the one that is looked at is gone
        expect(rows).to_have_count(1)
        expect(buttons.first).to_have_attribute("aria-pressed", "true")
        it.page.unroute_all()
        expect(it.page.locator("#replicas-panel")).to_be_hidden()
