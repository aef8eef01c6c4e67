"""Messages of a conversation hold text, whole or in parts, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fastgen
from fastgen.errors import InvalidArgumentError
from fastgen.runtime.llm import LLM
from tests.runtime.checkpoints import save_checkpoint, save_tokenizer


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Its template puts a message's content where a text goes, as most do."""
    directory = save_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    save_tokenizer(directory)
    with fastgen.load(directory, target="torch") as loaded:
        yield loaded


def rendered(llm: LLM, content: object) -> str:
    output = llm.chat([{"role": "user", "content": content}], max_new_tokens=1)
    return llm.tokenizer.decode(output.prompt_token_ids)


def test_parts_are_one_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": " sat"}]
    assert rendered(llm, parts) == rendered(llm, "the cat sat") == "<user>the cat sat\n<assistant>"
    assert rendered(llm, []) == rendered(llm, "")


@pytest.mark.parametrize(
    "content",
    [
        None,
        3,
        {"type": "text", "text": "x"},
        ["x"],
        [{"type": "image_url", "image_url": {"url": "x"}}],
        [{"type": "text"}],
        [{"type": "text", "text": "x"}, {"type": "text", "text": None}],
    ],
)
def test_what_is_no_text_is_refused(llm: LLM, content: object) -> None:
    with pytest.raises(InvalidArgumentError, match="message 1: content must be text"):
        llm.chat([{"role": "user", "content": "x"}, {"role": "user", "content": content}])


def test_what_was_given_is_left_as_it_is(llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
    llm.chat(messages, max_new_tokens=1)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
