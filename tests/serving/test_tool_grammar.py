"""Grammars of tool calls accept correct calls in every format, and nothing else."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.serving.tools.formats import TOOL_FORMATS, ToolFormat
from fastgen.serving.tools.grammar import ToolSchema, tool_grammar
from tests.serving.scripted import scripted_codec
from tests.serving.test_tool_calls import written

TOOLS = [
    ToolSchema(
        "look_up",
        {
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string"}},
        },
    ),
    ToolSchema("add", None),
]
SPECIAL = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<|START_ACTION|>",
)
RIGHT, NO_ARGUMENTS, WRONG = ("look_up", '{"city": "Oslo"}'), ("add", "{}"), ("look_up", '{"town": "Oslo"}')
SURPLUS = ("add", '{"a": 1}')
formats = pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=TOOL_FORMATS)


@pytest.fixture(scope="module", params=[(), SPECIAL], ids=["marks are text", "marks are tokens"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    tokenizer = scripted_codec(special_tokens=request.param).tokenizer
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<|end of the answer|>"])
    end = backend.token_to_id("<|end of the answer|>")
    tokenizer.library = llguidance.LLTokenizer(backend.to_str(), n_vocab=end + 1, eos_token=end)
    return tokenizer


def taken(tokenizer: Any, grammar: ResponseFormat, text: str) -> bool:
    """Returns whether ``text`` is a complete answer."""
    matcher = llguidance.LLMatcher(tokenizer.library, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for token_id in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if matcher.is_stopped() or not matcher.consume_token(token_id):
            return False
    return bool(matcher.is_accepting())


@formats
def test_required_calls(tool_format: ToolFormat, tokenizer: Any) -> None:
    calls = ([RIGHT], [RIGHT, NO_ARGUMENTS], [WRONG], [SURPLUS])
    one, two, *wrong = (written(tool_format, each) for each in calls)
    if tool_format.is_opening_optional:
        one, two, *wrong = (text.removeprefix(tool_format.opening) for text in (one, two, *wrong))
    special_ids = {text: tokenizer.convert_tokens_to_ids(text) for text in SPECIAL if text in tokenizer.get_vocab()}
    for is_parallel in (False, True):
        grammar = tool_grammar(tool_format, TOOLS, special_ids, is_required=True, is_parallel=is_parallel)
        assert taken(tokenizer, grammar, one)
        assert taken(tokenizer, grammar, two) == is_parallel
        for text in (*wrong, "", "Hello", "Hello" + one, one[:-1] if one[-1] != "}" else one[:-2]):
            assert not taken(tokenizer, grammar, text), text


@formats
def test_calls_that_may_be_left_out_keep_to_the_schema(tool_format: ToolFormat, tokenizer: Any) -> None:
    one, wrong = written(tool_format, [RIGHT]), written(tool_format, [WRONG])
    if tool_format.is_opening_optional:
        one, wrong = (text.removeprefix(tool_format.opening) for text in (one, wrong))
    special_ids = {text: tokenizer.convert_tokens_to_ids(text) for text in SPECIAL if text in tokenizer.get_vocab()}
    grammar = tool_grammar(tool_format, TOOLS, special_ids, is_required=False, is_parallel=True)
    for text in ("", "Hello <there>", one):
        assert taken(tokenizer, grammar, text), text
    assert not taken(tokenizer, grammar, wrong)
    if not tool_format.is_opening_optional:
        assert taken(tokenizer, grammar, "Let me see. " + one)
        assert not taken(tokenizer, grammar, "Let me see. " + wrong)


def test_an_answer_may_have_a_format_where_it_is_no_call(tokenizer: Any) -> None:
    content = ResponseFormat(
        "json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    )
    hermes = TOOL_FORMATS["hermes"]
    grammar = tool_grammar(hermes, TOOLS, {}, is_required=False, is_parallel=True, content=content)
    assert taken(tokenizer, grammar, '{"a": 1}')
    assert taken(tokenizer, grammar, written(hermes, [RIGHT]))
    assert not taken(tokenizer, grammar, '{"b": 1}')
    assert not taken(tokenizer, grammar, "Hello")


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_that_json_does_not_have_are_refused(number: float) -> None:
    tools = [ToolSchema("look_up", {"const": number})]
    with pytest.raises(InvalidArgumentError, match=r"cannot be written as JSON: .* \(in the parameters of look_up\)"):
        tool_grammar(TOOL_FORMATS["hermes"], tools, {}, is_required=True, is_parallel=False)


def test_compact_arguments_have_no_whitespace(tokenizer: Any) -> None:
    hermes = TOOL_FORMATS["hermes"]
    special_ids: dict[str, int] = {}
    grammar = tool_grammar(hermes, TOOLS, special_ids, is_required=True, is_parallel=False, is_compact=True)
    assert taken(tokenizer, grammar, written(hermes, [("look_up", '{"city":"Oslo"}')]))
    assert not taken(tokenizer, grammar, written(hermes, [("look_up", '{"city": "Oslo"}')]))
