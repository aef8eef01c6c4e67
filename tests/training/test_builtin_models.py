"""The built-in checkpoints and their tokenizer, as they lie in the repository."""

from __future__ import annotations

import hashlib
import json
from random import Random
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from training.data import IGNORED, generate_document, training_row
from training.models import MODEL_NAMES
from training.stories import generate_story
from training.tokenizer import CONTEXT, SPECIAL_TOKENS
from training.train import BUILTIN, RESULTS

pytestmark = pytest.mark.parametrize("name", MODEL_NAMES)


@pytest.fixture
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BUILTIN / name)


@pytest.fixture
def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_checkpoint_is_small_and_bfloat16(name: str) -> None:
    path = BUILTIN / name / "model.safetensors"
    assert path.stat().st_size <= 4_000_000
    with safe_open(path, framework="pt") as weights:
        assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_config_switches_on_what_the_family_is_known_for(name: str) -> None:
    config = AutoConfig.from_pretrained(BUILTIN / name)
    assert config.max_position_embeddings == CONTEXT
    if name == "tiny-opt":
        assert config.model_type == "opt"
        assert config.tie_word_embeddings
        return
    assert config.num_key_value_heads < config.num_attention_heads
    if name == "tiny-mistral":
        assert config.head_dim != config.hidden_size // config.num_attention_heads
        assert config.sliding_window < CONTEXT
        assert not config.tie_word_embeddings


def test_generation_stops_at_the_end_of_a_story_and_of_a_turn(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    generation = GenerationConfig.from_pretrained(BUILTIN / name)
    assert generation.do_sample
    assert generation.temperature == 0.7
    assert generation.eos_token_id == tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])
    assert (generation.bos_token_id, generation.pad_token_id) == (tokenizer.bos_token_id, tokenizer.pad_token_id)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Once upon a time, there was a fox.",
        "  two  blanks, a\ttab\r\nand lines\n\n",
        "naïve café, Straße, 日本語, العربية, हिन्दी",
        "👩‍🚀🏳️‍🌈🙂 ZWJ and flags 🇫🇮",
        "\x00\x7f\u200b\ufeff\U0010ffff",
        "don't isn't , . ! ? 3.14 <b>",
    ],
)
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_random_unicode_round_trips(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = Random(0)
    for _ in range(200):
        points = [rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))) for _ in range(30)]
        text = "".join(map(chr, points))
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_special_tokens_are_single_tokens_and_never_written_into_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.decode(range(len(SPECIAL_TOKENS)), skip_special_tokens=True) == ""


def test_stories_take_few_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    story = generate_story(Random(0))
    assert len(tokenizer.encode(story)) < 1.5 * len(story.split())


def test_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "You are kind."},
        {"role": "user", "content": " Hi! "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "A story, please."},
    ]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|bos|><|system|>You are kind.<|end|><|user|>Hi!<|end|><|assistant|>Hello!<|end|>"
        "<|user|>A story, please.<|end|><|assistant|>"
    )


def test_chat_template_with_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "user", "content": "Call it."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}]},
        {"role": "tool", "content": " 3 "},
    ]
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert text == (
        '<|bos|><|system|>These functions may be called:\n<tools>\n{"type": "function", "function": {"name": "f", '
        '"parameters": {"type": "object"}}}\n</tools>\nA call is written so:\n<tool_call>\n{"name": "a function", '
        '"arguments": {}}\n</tool_call><|end|><|user|>Call it.<|end|><|assistant|>\n<tool_call>\n{"name": "f", '
        '"arguments": {"a": [1]}}\n</tool_call><|end|><|user|><tool_response>\n3\n</tool_response><|end|><|assistant|>'
    )
    plain = tokenizer.apply_chat_template(messages[:1], tools=None, tokenize=False)
    assert plain == tokenizer.apply_chat_template(messages[:1], tools=[], tokenize=False)


def test_chat_template_refuses_unknown_roles(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match="narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False)


def test_training_rows_are_reproducible_and_full(tokenizer: PreTrainedTokenizerFast) -> None:
    inputs, targets = training_row("a", 300, tokenizer)
    assert len(inputs) == len(targets) == 300
    assert (inputs, targets) == training_row("a", 300, tokenizer)
    assert inputs != training_row("b", 300, tokenizer)[0]
    assert all(target in (following, IGNORED) for following, target in zip(inputs[1:], targets, strict=False))
    document = generate_document(Random(0), tokenizer)
    assert document.startswith("<|bos|>")
    assert document.endswith("<|endoftext|>")


def test_models_do_not_learn_to_speak_for_the_user(tokenizer: PreTrainedTokenizerFast) -> None:
    learned = {token for row in range(20) for token in training_row(f"{row}", 600, tokenizer)[1]}
    assert learned.isdisjoint(tokenizer.convert_tokens_to_ids(["<|system|>", "<|user|>", "<|assistant|>"]))
    assert learned >= set(tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"]))


def test_results_belong_to_the_checkpoint(name: str, results: dict[str, Any]) -> None:
    weights = (BUILTIN / name / "model.safetensors").read_bytes()
    assert results["sha256"] == hashlib.sha256(weights).hexdigest()
    assert results["bytes"] == len(weights)
    assert results["parameters"] < 2_000_000
    assert "seed" in results["schedule"]


def test_loss_fell(results: dict[str, Any]) -> None:
    losses = [point["loss"] for point in results["loss_curve"]]
    assert losses[0] > 3.0
    assert losses[-1] < 0.15 * losses[0]
    assert losses[-1] == pytest.approx(min(losses), abs=0.05)


@pytest.mark.parametrize("kind", ["early", "late", "chat"])
def test_most_sampled_sentences_parsed(results: dict[str, Any], kind: str) -> None:
    assert results["evaluation"][kind]["sentences"] > 300
    assert results["evaluation"][kind]["rate"] >= 0.97
