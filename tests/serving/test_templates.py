"""Chat templates in a process of their own: the same text as from transformers, and limited time and memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from fastgen.errors import InvalidArgumentError
from fastgen.models.checkpoint.hub import locate
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.prompts import TemplateOptions
from fastgen.serving.isolated import processes
from fastgen.serving.isolated.templates.renderer import TemplateRenderer
from fastgen.serving.refusals import UnavailableError

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Größe 👍"},
    {"role": "user", "content": "hello", "name": None},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, None]}}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
DUMP = (
    "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}{{ add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(locate("tiny-llama"))


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(tokenizer)
    yield renderer
    renderer.processes.close()


@pytest.mark.parametrize("template", [None, DUMP, {"default": "plain", "tool_use": DUMP}])
def test_it_renders_what_transformers_does(
    renderer: TemplateRenderer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: Any
) -> None:
    if template is not None:
        monkeypatch.setattr(tokenizer, "chat_template", template)
    for messages, tools in ((MESSAGES[:2], None), (MESSAGES, TOOLS)):
        expected = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        assert renderer.render(messages, tools, TemplateOptions()) == expected


def test_its_options_are_those_of_transformers(
    renderer: TemplateRenderer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Once upon"}]
    assert renderer.render(messages, None, TemplateOptions(add_generation_prompt=False)).endswith("Once upon<|end|>")
    options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    assert renderer.render(messages, None, options) == tokenizer.apply_chat_template(
        messages, continue_final_message=True, tokenize=False
    )
    assert renderer.render(messages, None, options).endswith("<|assistant|>Once upon")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ bos_token }}{{ documents }}{{ enable_thinking | tojson }}")
    options = TemplateOptions(variables={"enable_thinking": False, "documents": [{"text": "a"}], "bos_token": "b"})
    assert renderer.render(messages, None, options) == "b[{'text': 'a'}]false"


def test_arguments_of_calls_are_text_where_the_template_puts_texts_together(
    renderer: TemplateRenderer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = "{% set call = messages[2].tool_calls[0].function %}{{ call.name + '(' + call.arguments + ')' }}"
    monkeypatch.setattr(tokenizer, "chat_template", written)
    codec = TextCodec(tokenizer, eos_token_ids=frozenset(), default_sampling=SamplingParams())
    expected = codec.encode_text('f({"a": [1, null]})', add_special_tokens=False)
    assert codec.encode_chat(MESSAGES, TOOLS) == expected
    codec.render_chat = renderer.render
    assert codec.encode_chat(MESSAGES, TOOLS) == expected
    monkeypatch.setattr(tokenizer, "chat_template", written + "{{ 1 // 0 }}")
    with pytest.raises(InvalidArgumentError, match="division"):
        codec.encode_chat(MESSAGES, TOOLS)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = "{% set n = namespace(x='x' * 1000) %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
LONG = "{{ 'x' * 20000000 }}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOP, "more than 2 s of processor time"),
        (DOUBLE, "more than 512 MiB of memory"),
        (LONG, "more than 16777216 characters"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_costs_too_much_or_fails_is_refused_and_the_next_is_rendered(
    renderer: TemplateRenderer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str, why: str
) -> None:
    codec = TextCodec(tokenizer, eos_token_ids=frozenset(), default_sampling=SamplingParams())
    codec.render_chat = renderer.render
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(InvalidArgumentError, match=why):
            codec.encode_chat(MESSAGES[:2])
    assert codec.encode_chat(MESSAGES[1:2])


def test_a_process_that_ended_is_started_again(renderer: TemplateRenderer) -> None:
    expected = renderer.render(MESSAGES[:2], None, TemplateOptions())
    (process,) = renderer.processes._processes
    process.kill()
    process._process.wait()
    assert renderer.render(MESSAGES[:2], None, TemplateOptions()) == expected
    assert process not in renderer.processes._processes


def _pids(renderer: TemplateRenderer) -> set[int]:
    """Returns the ids of the running processes."""
    return {process.pid for process in list(renderer.processes._processes) if process.is_alive}


def _end_each(renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> list[int]:
    """Sends a signal to each process that takes work, just before it gets it. Returns the list of their ids."""
    ended: list[int] = []
    take = renderer.processes._take

    def take_and_signal() -> Any:
        process = take()
        os.kill(process.pid, number)
        ended.append(process.pid)
        return process

    monkeypatch.setattr(renderer.processes, "_take", take_and_signal)
    return ended


def test_a_conversation_whose_process_is_killed_is_rendered_by_another(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = renderer.render(MESSAGES[:2], None, TemplateOptions())
    take, ended = renderer.processes._take, []

    def take_and_kill_once() -> Any:
        process = take()
        if not ended:
            ended.append(process.pid)
            process.kill()
        return process

    monkeypatch.setattr(renderer.processes, "_take", take_and_kill_once)
    assert renderer.render(MESSAGES[:2], None, TemplateOptions()) == expected
    assert ended
    assert ended[0] not in _pids(renderer)


def test_a_conversation_whose_processes_are_killed_is_not_called_wrong(
    renderer: TemplateRenderer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = TextCodec(tokenizer, eos_token_ids=frozenset(), default_sampling=SamplingParams())
    codec.render_chat = renderer.render
    with monkeypatch.context() as patch:
        killed = _end_each(renderer, patch, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="2 helper processes were killed"):
            codec.encode_chat(MESSAGES[:2])
    assert len(set(killed)) == 2
    assert codec.encode_chat(MESSAGES[:2])


def test_a_process_that_stands_still_is_ended_after_some_time(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = renderer.render(MESSAGES[:2], None, TemplateOptions())
    with monkeypatch.context() as patch:
        patch.setattr(processes, "MAX_WALL_S", 0.2)
        stopped = _end_each(renderer, patch, signal.SIGSTOP)
        long = [{"role": "user", "content": "x" * (1 << 20)}]  # more than a pipe holds
        with pytest.raises(UnavailableError):
            renderer.render(long, None, TemplateOptions())
    assert len(set(stopped)) == 2
    assert not set(stopped) & _pids(renderer)
    assert renderer.render(MESSAGES[:2], None, TemplateOptions()) == expected


def test_who_would_wait_for_a_conversation_that_takes_long_is_rendered_by_another_process(
    renderer: TemplateRenderer,
) -> None:
    expected = renderer.render(MESSAGES[:2], None, TemplateOptions())
    busy = renderer.processes._take()
    assert renderer.render(MESSAGES[:2], None, TemplateOptions()) == expected
    assert len(renderer.processes._processes) == 2
    renderer.processes._idle.put(busy)


def test_what_is_rendered_when_all_processes_are_ended_fails(tokenizer: Any) -> None:
    renderer = TemplateRenderer(tokenizer)
    renderer.processes.start()
    (process,) = renderer.processes._processes
    renderer.processes.close()
    assert not process.is_alive
    with pytest.raises(UnavailableError, match="ending"):
        renderer.render(MESSAGES[:2], None, TemplateOptions())
