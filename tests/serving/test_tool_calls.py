"""Tool calls are parsed from text of every format, however it is split; text that is no call is content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.serving.tools.calls import Arguments, CallBegins, CallEnds, Content, Event, ToolCallParser
from fastgen.serving.tools.formats import TOOL_FORMATS, NamedCall, ObjectCall, ToolFormat, tool_format_of

NAMES = ("look_up", "add")
Call = tuple[str, str]


def read(tool_format: ToolFormat, pieces: list[str]) -> tuple[str, list[Call]]:
    """Returns the content, and the name and arguments of each call; checks that events come in order."""
    parser = ToolCallParser(tool_format, NAMES)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    content, calls, is_open = "", list[Call](), False
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegins):
            assert event.index == len(calls)
            assert not is_open
            calls.append((event.name, ""))
            is_open = True
        else:
            assert event.index == len(calls) - 1
            assert is_open
            if isinstance(event, Arguments):
                calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
            is_open = not isinstance(event, CallEnds)
    assert parser.num_calls == len(calls)
    return content, calls


def written(tool_format: ToolFormat, calls: list[Call]) -> str:
    """Returns ``calls`` as a model would write them."""
    call = tool_format.call
    if isinstance(call, NamedCall):
        each = [call.before + name + call.between + arguments + call.after for name, arguments in calls]
    else:
        each = [f'{{"{call.name_key}": "{name}", "{call.arguments_key}": {arguments}}}' for name, arguments in calls]
    if tool_format.separator is None:
        return ("\n" if tool_format.closing else "").join(
            tool_format.opening + one + tool_format.closing for one in each
        )
    return tool_format.opening + tool_format.separator.join(each) + tool_format.closing


def parser_events(tool_format: ToolFormat, text: str) -> list[Event]:
    parser = ToolCallParser(tool_format, NAMES)
    return parser.feed(text) + parser.finish()


formats = pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
json_objects = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=3,
)


@formats
@settings(max_examples=40)
@given(data=st.data())
def test_calls_are_read_as_they_were_written(tool_format: ToolFormat, data: st.DataObject) -> None:
    objects = data.draw(st.lists(st.tuples(st.sampled_from(NAMES), json_objects), min_size=1, max_size=3))
    calls = [(name, json.dumps(each, ensure_ascii=data.draw(st.booleans()))) for name, each in objects]
    before = data.draw(st.sampled_from(["", "I look it up."]))
    text = before + written(tool_format, calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(tool_format, pieces) == (before, calls)
    assert read(tool_format, list(text)) == (before, calls)


@formats
def test_pieces_that_come_together_are_one_event(tool_format: ToolFormat) -> None:
    arguments = '{"city": "Pa\\"r}is", "n": [1, {"a": null}]}'
    events = parser_events(tool_format, "I look it up." + written(tool_format, [("look_up", arguments)]))
    assert events == [Content("I look it up."), CallBegins(0, "look_up"), Arguments(0, arguments), CallEnds(0)]
    no_call = f"{tool_format.opening}no"
    assert parser_events(tool_format, no_call) == [Content(no_call)], "its opening is content when the rest is known"


@formats
@settings(max_examples=40)
@given(text=st.text(alphabet=' \n<|>[]{}":,\\atool_cn', max_size=60))
def test_what_is_no_call_is_content(tool_format: ToolFormat, text: str) -> None:
    assert read(tool_format, list(text)) == (text, [])


@formats
@settings(max_examples=40)
@given(data=st.data())
def test_a_call_that_breaks_off_is_content_or_a_call_begun(tool_format: ToolFormat, data: st.DataObject) -> None:
    arguments = '{"city": "Pa\\"r}is", "n": [1, {"a": null}]}'
    text = written(tool_format, [("look_up", arguments)])
    end = data.draw(st.integers(1, len(text) - 1))
    content, calls = read(tool_format, [text[:end]])
    if calls:
        assert calls[0][0] == "look_up"
        assert arguments.startswith(calls[0][1])
        assert content == ""
    else:
        assert content == text[:end]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", 'ok <tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "add", "extra": 1}</tool_call>', None, []),
        ("hermes", '<tool_call>no <tool_call>{"name": "add"}</tool_call>', "<tool_call>no", [("add", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>Done.', "Done.", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n ', "", [("add", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "abcdefghi"}]', "", [("add", "{}")]),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ("llama3", '\n{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
        ("llama3", '{"answer": 4}', None, []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}no', "no", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool', "", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add"]</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "add", "parameter": {"a": 1}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "add", "id": [1, "}"], "type": 2}</tool_call>', "", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "name": "look_up"}</tool_call>', None, []),
        ("hermes", '<tool_call>{"arguments": {}, "arguments": {}, "name": "add"}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "add", "arguments": tru}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "add", "arguments": "5"}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "add", "arguments": "null"}</tool_call>', "", [("add", "{}")]),
        ("hermes", 'It is \n<tool_call> {"name" : "add"} </tool_call> so', "It is so", [("add", "{}")]),
        ("hermes", "\n ", None, []),
        ("llama3", 'It is {"name": "add", "parameters": {}}', None, []),
    ],
)
def test_what_models_write_besides(name: str, text: str, content: str | None, calls: list[Call]) -> None:
    assert read(TOOL_FORMATS[name], list(text)) == (text if content is None else content, calls)


def test_what_is_certain_is_given_at_once() -> None:
    parser = ToolCallParser(TOOL_FORMATS["hermes"], NAMES)
    assert parser.feed("Hello <tool") == [Content("Hello")]
    assert parser.feed("box") == [Content(" <toolbox")]
    begun = parser.feed('<tool_call>{"name": "add", "arguments": {"a": ')
    assert begun == [CallBegins(0, "add"), Arguments(0, '{"a": ')]
    assert parser.feed("1}") == [Arguments(0, "1}"), CallEnds(0)]
    assert parser.feed("}</tool_call>") == []
    assert parser.finish() == []


def test_a_name_may_have_64_characters_and_a_longer_text_is_given_on_as_content() -> None:
    named, name = TOOL_FORMATS["mistral-named"], "f" * 64
    parser = ToolCallParser(named, [name])
    text = "[TOOL_CALLS]" + name + "[ARGS]{}"
    first, *_, last = [event for character in text for event in parser.feed(character)] + parser.finish()
    assert (first, last) == (CallBegins(0, name), CallEnds(0))
    text = "[TOOL_CALLS]" + "f" * 80
    assert ToolCallParser(named, NAMES).feed(text) == [Content(text)]
    parser, text = ToolCallParser(named, NAMES), "[TOOL_CALLS]" + "f" * (64 + len("[ARGS]"))
    assert parser.feed(text) == [], "the mark after a name may be the last that came"
    assert parser.feed("f") == [Content(text + "f")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}within <tool_call></tool_call> tags", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS] … [TOOL_CALLS] [", "mistral"),
        ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral-named"),
        ('{% if tools is not none %}{{ \'{"name": "\' + name }}{{ \'"parameters": \' }}<|python_tag|>', "llama3"),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json", "deepseek-v3"),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek-v3.1"),
        ("{{ available_tools or tools }}<|tool_call|>", "granite"),
        ("{{ tools }}<|START_ACTION|>", "command"),
        ("{{ tools }}", None),
        ("{{ tools }}<tool_call>\n<function=name>\n<parameter=city>Oslo</parameter>", None),
        ("<tool_call>", None),
    ],
)
def test_the_template_decides(template: str, name: str | None) -> None:
    assert tool_format_of(template) == (None if name is None else TOOL_FORMATS[name])


def test_every_format_has_keys_of_its_own() -> None:
    objects = [each.call for each in TOOL_FORMATS.values() if isinstance(each.call, ObjectCall)]
    assert all(call.name_key != call.arguments_key for call in objects)
