"""Between text and ids: the checkpoint's own tokenizer, template and generation settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastgen.errors import CheckpointError, InvalidArgumentError, PromptTooLongError
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text import codec as module
from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.tokenizer_checks import growth_of
from tests.runtime.checkpoints import save_tokenizer

USER = [{"role": "user", "content": "the cat"}]


def save_wrapping_tokenizer(directory: Path) -> None:
    """Puts ``<s>`` before every text, and has a template that writes its own."""
    save_tokenizer(directory, chat_template="<s>{% for m in messages %}<user>{{ m.content }}{% endfor %}"
                                            "{% if add_generation_prompt %}<assistant>{% endif %}")  # fmt: skip
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(tokenizer))


def codec_of(directory: Path, generation: Any = None, **config: Any) -> TextCodec:
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return TextCodec.from_checkpoint(directory, config)


def test_special_tokens_go_around_text_once(tmp_path: Path) -> None:
    save_wrapping_tokenizer(tmp_path)
    codec = codec_of(tmp_path)
    ids = codec.encode("the cat")
    assert ids[0] == 1
    assert ids[1:] == codec.tokenizer("the cat", add_special_tokens=False)["input_ids"]
    assert 1 not in ids[1:]
    assert codec.encode("") == [1]
    chat = codec.encode_chat(USER)
    assert chat.count(1) == 1, "the template's own <s> is not put there a second time"
    assert codec.tokenizer.decode(chat) == "<s><user>the cat<assistant>"


def test_ids_stay_as_they_are_and_become_plain_integers(tmp_path: Path) -> None:
    codec = codec_of(tmp_path)
    assert codec.encode([5, 0, 10**9]) == [5, 0, 10**9]
    for prompt in (np.array([5, 6]), range(5, 7), (5, 6)):
        found = codec.encode(prompt)  # type: ignore[arg-type]
        assert found == [5, 6]
        assert all(type(token_id) is int for token_id in found)
    for bad in ([5, True], [5, 6.0], [5, "6"], [5, None]):
        with pytest.raises(InvalidArgumentError, match=r"prompt token 1 is .*, not a token id"):
            codec.encode(bad)


def test_a_conversation_is_not_changed(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template="{% for m in messages %}{% set _ = m.update(role='x') %}{% endfor %}cat")
    messages = [dict(message) for message in USER]
    codec = codec_of(tmp_path)
    with pytest.raises(InvalidArgumentError, match="refuses this conversation"):
        codec.encode_chat(messages)
    assert messages == USER


@pytest.mark.parametrize(
    ("generation", "config", "with_tokenizer", "expected"),
    [
        ({"eos_token_id": 9}, {"eos_token_id": 8}, True, {9}),
        ({"eos_token_id": [9, 7]}, {"eos_token_id": 8}, True, {9, 7}),
        ({"eos_token_id": None}, {"eos_token_id": 8}, True, {8}),
        ({}, {"eos_token_id": [8, 6]}, True, {8, 6}),
        (None, {"eos_token_id": 0}, True, {0}),
        (None, {"eos_token_id": None}, True, {2}),
        (None, {}, True, {2}),
        (None, {}, False, set()),
    ],
)
def test_which_ids_end_a_text(
    tmp_path: Path, generation: Any, config: dict[str, Any], with_tokenizer: bool, expected: set[int]
) -> None:
    """``generation_config.json`` before ``config.json`` before the tokenizer (whose ``</s>`` is 2)."""
    if with_tokenizer:
        save_tokenizer(tmp_path)
    codec = codec_of(tmp_path, generation, **config)
    assert codec.eos_token_ids == expected
    assert codec.has_tokenizer == with_tokenizer == (codec.tokenizer is not None)


def test_sampling_defaults(tmp_path: Path) -> None:
    assert codec_of(tmp_path).default_sampling == SamplingParams()
    found = codec_of(tmp_path, {"do_sample": True, "top_p": 0.5, "max_new_tokens": 3}).default_sampling
    assert found == SamplingParams(temperature=1.0, top_p=0.5)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p must be"):
        codec_of(tmp_path, {"do_sample": True, "top_p": 2})


def test_without_a_tokenizer_text_is_refused(tmp_path: Path) -> None:
    codec = codec_of(tmp_path)
    with pytest.raises(InvalidArgumentError, match="a text prompt needs a tokenizer"):
        codec.encode("text")
    with pytest.raises(InvalidArgumentError, match="a conversation needs a tokenizer"):
        codec.encode_chat(USER)


def test_no_code_of_the_checkpoint_is_run(tmp_path: Path) -> None:
    """A tokenizer class of the checkpoint's own is refused, and its module is not imported."""
    marker = tmp_path / "was_run"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass EvilTokenizer: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}})
    )
    with pytest.raises(CheckpointError, match="its tokenizer needs code of the checkpoint's own") as refused:
        codec_of(tmp_path)
    assert "trust_remote_code" not in str(refused.value)
    assert not marker.exists()


def test_a_detokenizer_knows_the_prompt_the_stop_strings_and_when_they_count(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    codec = codec_of(tmp_path)
    cat = codec.encode("the cat")
    dog = codec.encode(" the dog")
    detokenizer = codec.new_detokenizer(cat, SamplingParams(stop=["do"]))
    text = "".join(detokenizer.append(token_id) for token_id in dog)
    assert (text, detokenizer.stopped) == (" the ", True)
    late = codec.new_detokenizer(cat, SamplingParams(stop=["the"], min_new_tokens=len(dog)))
    text = "".join(late.append(token_id) for token_id in dog) + late.finish()
    assert (text, late.stopped) == (" the dog", False)
    # half of é in the prompt, half in the answer
    first, second = codec.tokenizer.convert_tokens_to_ids(["Ã", "©"])
    split = codec.new_detokenizer([*cat, first], SamplingParams())
    assert split.append(second) == "é"


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(tmp_path)
    codec = codec_of(tmp_path)
    codec.max_tokens = 10
    lengths: list[int] = []
    kind = type(codec.tokenizer)
    call = kind.__call__

    def counted(tokenizer: Any, text: str, **arguments: Any) -> Any:
        lengths.append(len(text))
        return call(tokenizer, text, **arguments)

    monkeypatch.setattr(kind, "__call__", counted)
    assert len(codec.encode("the cat " * 8)) >= 16, "a text slightly too long is encoded"
    assert len(codec.encode([1] * 1000)) == 1000
    with pytest.raises(PromptTooLongError, match="4000000 characters has more than 10 tokens"):
        codec.encode("the " * 1_000_000)
    assert max(lengths) < 2000


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


@pytest.mark.parametrize(
    ("rules", "growth"),
    [
        ([], 1),
        ([replace("a", "a" * 16)] * 6, 16**6),
        ([replace(" ", "▁"), replace("``", '"'), replace(" {2,}", " ", "Regex")], 1),
        ([replace("ab", "abcde"), replace("", "x")], 3 * 2),
        ([replace("x*", "yy", "Regex")], 3),
        ([replace(r"\p{L}", "yy", "Regex")], 3),  # Python does not read it
        ([{"type": "Sequence", "normalizers": [replace("a", "aaaa")] * 2}, replace("a", "")], 16),
        ([{"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAB4AHl5eQA="}, {"type": "NFKC"}], 3),
    ],
)
def test_how_much_longer_the_rules_of_a_tokenizer_make_a_text(rules: list[dict[str, Any]], growth: int) -> None:
    assert growth_of({"type": "Sequence", "normalizers": rules}) == growth


@pytest.mark.parametrize("name", ["normalizer", "decoder"])
def test_a_tokenizer_that_makes_texts_far_longer_is_refused(tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer[name] = {"type": "Sequence", f"{name}s": [replace("a", "aa")] * 5}
    file.write_text(json.dumps(tokenizer))
    assert codec_of(tmp_path).encode("a")
    tokenizer[name][f"{name}s"] = [replace("a", "a" * 16)] * 6
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(
        CheckpointError, match=f"{name} of its tokenizer may make 16777216 characters of one; at most 32"
    ):
        codec_of(tmp_path)


def test_a_tokenizer_with_a_token_of_a_huge_text_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    new_id = len(vocabulary) + len(tokenizer["added_tokens"])
    vocabulary["x" * 4096] = new_id
    file.write_text(json.dumps(tokenizer))
    assert codec_of(tmp_path).encode("a")
    del vocabulary["x" * 4096]
    vocabulary["x" * 5000] = new_id
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="has 5000 characters; at most 4096"):
        codec_of(tmp_path)


def test_the_text_of_ids_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token may have thousands of characters, and a request a million ids."""
    save_tokenizer(tmp_path)
    codec = codec_of(tmp_path)
    ids = codec.encode("the cat")
    monkeypatch.setattr(module, "MAX_TEXT_CHARACTERS", 14)
    assert codec.decode(ids * 2) == "the catthe cat"
    with pytest.raises(InvalidArgumentError, match=f"text of {3 * len(ids)} token ids has more than 14 characters"):
        codec.decode(ids * 3)
    pieces = codec.pieces(ids * 3)
    assert "".join(next(pieces) for _ in ids * 2) == "the catthe cat"
    with pytest.raises(InvalidArgumentError, match=f"after the first {2 * len(ids) + 1} of them"):
        next(pieces)


@pytest.mark.parametrize(
    ("num_characters", "max_tokens", "encoded"),
    [
        (80, 10, [80]),
        (81, 10, [80, 81]),
        (640, 10, [80, 160, 320, 640]),
        (641, 10, [80, 160, 320, 640, 641]),
        (9, 1, [8, 9]),
    ],
)
def test_beginnings_of_eight_characters_a_token_and_twice_as_many_are_encoded_before_a_text(
    tmp_path: Path, num_characters: int, max_tokens: int, encoded: list[int]
) -> None:
    save_tokenizer(tmp_path)
    codec = codec_of(tmp_path)
    calls: list[tuple[int, bool]] = []

    def encode(text: str, adds_special_tokens: bool) -> list[int]:
        calls.append((len(text), adds_special_tokens))
        return [7]

    codec.encode_plain, codec.max_tokens = encode, max_tokens
    assert codec.encode_text("a" * num_characters, add_special_tokens=True) == [7]
    assert calls == [(length, False) for length in encoded[:-1]] + [(encoded[-1], True)]


@pytest.mark.parametrize(("num_tokens", "is_refused"), [(74, False), (75, True)])
def test_a_beginning_may_have_sixty_four_tokens_too_many(tmp_path: Path, num_tokens: int, is_refused: bool) -> None:
    """The last tokens of a text that is cut may differ from those of the whole text."""
    save_tokenizer(tmp_path)
    codec = codec_of(tmp_path)
    codec.encode_plain, codec.max_tokens = lambda text, adds_special_tokens: [0] * num_tokens, 10
    if is_refused:
        with pytest.raises(PromptTooLongError, match="a text of 81 characters has more than 10 tokens"):
            codec.encode("a" * 81)
    else:
        assert len(codec.encode("a" * 81)) == num_tokens


@pytest.mark.parametrize("named", [[9, "7"], [9, True], [9, -1], "9", True, -1, 9.0])
def test_a_model_whose_end_of_text_is_no_token_id_is_refused(tmp_path: Path, named: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id must be a token id or a list of them"):
        codec_of(tmp_path, eos_token_id=named)


@pytest.mark.parametrize("message", ["x", 5, {"role": 3, "content": "x"}, {"role": "user"}, {"content": "x"}])
def test_a_message_has_a_role_and_a_content(tmp_path: Path, message: Any) -> None:
    save_wrapping_tokenizer(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"message 1 must be \{'role': …, 'content': …\}, not "):
        codec_of(tmp_path).encode_chat([*USER, message])


@pytest.mark.parametrize(
    "part", ["x", {"text": "x"}, {"type": "image", "text": "x"}, {"type": "text"}, {"type": "text", "text": 3}]
)
def test_a_part_of_a_message_is_a_text(tmp_path: Path, part: Any) -> None:
    save_wrapping_tokenizer(tmp_path)
    codec, good = codec_of(tmp_path), {"type": "text", "text": "the "}
    with pytest.raises(InvalidArgumentError, match=r"message 0: content must be text, or parts .*, not "):
        codec.encode_chat([{"role": "user", "content": [good, part]}])
    parts = [good, {"type": "text", "text": "cat"}]
    assert codec.encode_chat([{"role": "user", "content": parts}]) == codec.encode_chat(USER)


def test_arguments_of_calls_are_text_for_a_template_that_joins_them(tmp_path: Path) -> None:
    """Calls that are no calls are left as they are."""
    save_wrapping_tokenizer(tmp_path)
    codec, rendered = codec_of(tmp_path), list[Any]()

    def render(messages: list[dict[str, Any]], tools: Any, options: Any) -> str:
        rendered.append(messages[0].get("tool_calls"))
        if len(rendered) == 1:
            raise TypeError('can only concatenate str (not "dict") to str')
        return "cat"

    codec.render_chat = render
    as_object, as_text = ({"id": 1, "function": {"name": "f", "arguments": each}} for each in ({"é": 1}, '{"é": 1}'))
    others = [as_text, {"function": 3}, {"function": {"name": "f"}}, "x"]
    codec.encode_chat([{**USER[0], "tool_calls": [as_object, *others]}])
    assert rendered == [[as_object, *others], [as_text, *others]]
