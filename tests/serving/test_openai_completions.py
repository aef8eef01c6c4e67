"""``/v1/completions`` with OpenAI's own client: results equal those of the library for the same tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai.types import Completion

import fastgen
from fastgen.runtime.requests.outputs import FinishReason, GenerationOutput
from tests.serving.scripted import MODEL as SCRIPTED
from tests.serving.scripted import ScriptedService, ask, scripted_codec
from tests.serving.server_process import ServerProcess

MODEL = "tiny-llama"
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def ids_of(llm: fastgen.LLM, text: str) -> list[int]:
    ids: list[int] = llm.tokenizer(text)["input_ids"]
    return ids


def spelled(llm: fastgen.LLM, token_id: int) -> str:
    """Returns the text of a token inside a text, or of a special one."""
    if token_id in llm.tokenizer.all_special_ids:
        return str(llm.tokenizer.convert_ids_to_tokens(token_id))
    return str(llm.tokenizer.decode([token_id]))


def test_text_and_usage(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=20, temperature=0.8, seed=3, presence_penalty=0.5)
    found = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0.8, seed=3, presence_penalty=0.5
    )
    assert (found.object, found.model) == ("text_completion", MODEL)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason, choice.index) == (expected.text, expected.finish_reason, 0)
    assert choice.logprobs is None
    assert found.usage is not None
    num_prompt = len(expected.prompt_token_ids)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (num_prompt, len(expected.token_ids))
    assert found.usage.total_tokens == num_prompt + len(expected.token_ids)


def test_defaults_are_those_of_openai_and_of_the_checkpoint(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=16, seed=1)
    assert expected != llm.generate(PROMPT, max_new_tokens=16, temperature=0)
    found = client.completions.create(model=MODEL, prompt=PROMPT, seed=1)
    assert found.choices[0].text == expected.text
    assert found.usage is not None
    assert found.usage.completion_tokens == 16


def test_top_p_of_0_keeps_one_token(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=24, temperature=0)
    found = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=2, top_p=0, best_of=1)
    assert found.choices[0].text == expected.text


def test_batches_of_prompts_in_every_form(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    texts = [PROMPT, "The little fox"]
    ids = [ids_of(llm, text) for text in texts]
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "n": 2}
    expected = [each for output in llm.generate(texts, max_new_tokens=8, **fields) for each in output.completions]
    for prompt in (texts, ids):
        found = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, **fields)
        assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in found.choices] == [each.text for each in expected]
        assert found.usage is not None
        assert found.usage.prompt_tokens == sum(map(len, ids))
        assert found.usage.completion_tokens == sum(len(each.token_ids) for each in expected)
    one = client.completions.create(model=MODEL, prompt=ids[0], max_tokens=8, best_of=2, **fields)
    assert [choice.text for choice in one.choices] == [each.text for each in expected[:2]]


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs(client: openai.OpenAI, llm: fastgen.LLM, num_top: int) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=8, temperature=1, seed=2, logprobs=num_top)
    found = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=1, seed=2, logprobs=num_top
    ).choices[0]
    check_logprobs(llm, found, expected, num_top, echoes=False)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_scores_the_prompt(client: openai.OpenAI, llm: fastgen.LLM, max_tokens: int, as_ids: bool) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=max(max_tokens, 1), temperature=0, logprobs=1, prompt_logprobs=1)
    prompt: Any = ids_of(llm, PROMPT) if as_ids else PROMPT
    found = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=1, echo=True
    )
    choice = found.choices[0]
    assert choice.text == PROMPT + (expected.text if max_tokens else "")
    assert choice.finish_reason == "length"
    assert found.usage is not None
    assert found.usage.completion_tokens == max_tokens
    check_logprobs(llm, choice, expected, 1, echoes=True, shows_answer=max_tokens > 0)


def test_the_prompt_may_fill_the_model_but_for_one_token(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    ids = (ids_of(llm, PROMPT) * llm.config.max_model_len)[: llm.config.max_model_len]
    found = client.completions.create(model=MODEL, prompt=ids[:-1], max_tokens=0, echo=True, logprobs=0)
    assert found.choices[0].logprobs is not None
    assert len(found.choices[0].logprobs.tokens or ()) == len(ids) - 1
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=ids)
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")


def check_logprobs(
    llm: fastgen.LLM, choice: Any, expected: GenerationOutput, num_top: int, *, echoes: bool, shows_answer: bool = True
) -> None:
    """Compares with the library, token by token, and checks that each token stands in the text at its offset."""
    ids, logprobs = [], []
    if echoes:
        assert expected.prompt_logprobs is not None
        ids, logprobs = [*expected.prompt_token_ids], [*expected.prompt_logprobs]
    if shows_answer:
        ids, logprobs = ids + expected.token_ids, logprobs + (expected.logprobs or [])
    told = choice.logprobs
    assert told.tokens == [spelled(llm, token_id) for token_id in ids]
    assert told.token_logprobs == [each and each[token_id] for token_id, each in zip(ids, logprobs, strict=True)]
    for token_id, each, top in zip(ids, logprobs, told.top_logprobs, strict=True):
        if each is None:
            assert top is None
            continue
        likeliest = sorted(each.values(), reverse=True)[:num_top]
        assert list(top.values()) == sorted({*likeliest, each[token_id]}, reverse=True)
        assert top[spelled(llm, token_id)] == each[token_id]
    ends = [*told.text_offset[1:], len(choice.text)]
    for token_id, begin, end in zip(ids, told.text_offset, ends, strict=True):
        is_special = token_id in llm.tokenizer.all_special_ids
        assert choice.text[begin:end] == ("" if is_special else spelled(llm, token_id))


def test_a_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "prompt": [PROMPT, "A dog"], "max_tokens": 7, "n": 2, "seed": 4, "logprobs": 2, "echo": True
    }  # fmt: skip
    whole = client.completions.create(**fields)
    texts, told, finishes = {}, {}, {}
    *chunks, last = client.completions.create(
        **fields, stream=True, stream_options={"include_usage": True, "include_obfuscation": True}
    )
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            lists = told.setdefault(
                choice.index, {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            )
            for name, values in lists.items():
                values += getattr(choice.logprobs, name)
            assert choice.index not in finishes
            if choice.finish_reason is not None:
                finishes[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert finishes[choice.index] == choice.finish_reason
        assert choice.logprobs is not None
        assert told[choice.index] == choice.logprobs.model_dump()
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


def test_stop_strings(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=60, temperature=0)
    stop = expected.text.split()[9]
    cut = llm.generate(PROMPT, max_new_tokens=60, temperature=0, stop=["xyz", stop])
    fields: dict[str, Any] = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop": ["xyz", stop]
    }  # fmt: skip
    found = client.completions.create(**fields, logprobs=0).choices[0]
    assert (found.text, found.finish_reason) == (cut.text, "stop")
    assert stop not in found.text
    assert found.logprobs is not None
    assert max(found.logprobs.text_offset or ()) <= len(found.text)
    streamed = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    assert "".join(choice.text for choice in streamed) == cut.text
    assert [choice.finish_reason for choice in streamed] == [None] * (len(streamed) - 1) + ["stop"]


@pytest.mark.parametrize("spells", [False, True])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_offsets_of_tokens_beside_special_ones(spells: bool, reason: FinishReason) -> None:
    """In prompts that spell special tokens, in answers where they have a text, and where a stop string cuts a token."""
    codec = scripted_codec("", ("<think>",))
    answer = codec.encode_text("One<think>two three", add_special_tokens=False)
    service = ScriptedService(codec, lambda prompt, sampling: (answer, reason))
    fields: dict[str, Any] = {
        "model": SCRIPTED, "prompt": "Say<think>it.", "max_tokens": 50, "logprobs": 0, "echo": True, "stop": "ree",
        "extra_body": {"skip_special_tokens": not spells},
    }  # fmt: skip

    async def use(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        stream = await client.completions.create(**fields, stream=True)
        return (await client.completions.create(**fields)).choices[0], [chunk.choices[0] async for chunk in stream]

    whole, streamed = ask(service, use)
    assert whole.text == "".join(one.text for one in streamed)
    assert whole.text == f"Say<think>it.One{'<think>' if spells else ''}two th"
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert getattr(whole.logprobs, name) == [each for one in streamed for each in getattr(one.logprobs, name)]
    bos, *offsets = zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True)
    assert bos[1] == 0
    for token, offset in offsets:
        has_text = token != "<think>" or spells or offset < len("Say<think>it.")
        assert whole.text[offset:].startswith(token if has_text else "") or offset + len(token) > len(whole.text)


def test_extensions_reach_the_engine(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    cases: list[dict[str, Any]] = [
        {"top_k": 2, "temperature": 1.5, "seed": 1},
        {"min_p": 0.2, "temperature": 1.5, "seed": 1},
        {"repetition_penalty": 1.5, "temperature": 0},
        {"ignore_eos": True, "temperature": 0},
        {"stop_token_ids": ids_of(llm, " the")[1:], "temperature": 0},
        {"beam_width": 3, "n": 2, "temperature": 0},
        {"priority": -3, "timeout_s": 60.0, "temperature": 0},
    ]
    for fields in cases:
        expected = llm.generate(PROMPT, max_new_tokens=24, **fields)
        named = {name: fields[name] for name in fields.keys() & {"temperature", "seed", "n"}}
        extra = {name: value for name, value in fields.items() if name not in named}
        found = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, **named, extra_body=extra)
        assert [each.text for each in found.choices] == [each.text for each in expected.completions], fields
    expected = llm.generate("The end.", max_new_tokens=24, min_new_tokens=24, temperature=0)
    found = client.completions.create(
        model=MODEL, prompt="The end.", max_tokens=24, temperature=0, extra_body={"min_tokens": 24}
    )
    assert found.choices[0].text == expected.text
    assert found.usage is not None
    assert found.usage.completion_tokens == 24


def test_a_beam_search_needs_no_temperature(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=6, temperature=0, beam_width=4)
    found = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, extra_body={"beam_width": 4})
    assert found.choices[0].text == expected.text


def test_logit_bias_takes_ids_as_text(client: openai.OpenAI, llm: fastgen.LLM) -> None:
    token_id = ids_of(llm, " fox")[-1]
    found = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0, logit_bias={str(token_id): 100}
    )
    assert found.choices[0].text == " fox fox fox"


def test_cached_tokens_are_counted(client: openai.OpenAI) -> None:
    prompt = "A story of a prompt that is long enough to fill blocks. " * 6
    first, second = (client.completions.create(model=MODEL, prompt=prompt, max_tokens=1) for _ in range(2))
    for found, is_cached in ((first, False), (second, True)):
        assert found.usage is not None
        assert found.usage.prompt_tokens_details is not None
        assert bool(found.usage.prompt_tokens_details.cached_tokens) == is_cached


def test_a_stream_counts_cached_tokens_once_for_each_prompt(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "Another story that is long enough. " * 9, "max_tokens": 2}
    client.completions.create(**fields)
    whole = client.completions.create(**fields, n=2).usage
    *_, last = client.completions.create(**fields, n=2, stream=True, stream_options={"include_usage": True})
    assert whole is not None
    assert last.usage == whole
    assert whole.prompt_tokens_details is not None
    assert 0 < (whole.prompt_tokens_details.cached_tokens or 0) < whole.prompt_tokens


def test_prompts_that_the_model_does_not_have_are_refused() -> None:
    service = ScriptedService(scripted_codec(), lambda prompt, sampling: ([5], "stop"))
    vocab_size = service.facts.vocab_size

    def post(prompt: Any, **fields: Any) -> None:
        asked = {"model": SCRIPTED, "prompt": prompt, "extra_body": fields}
        ask(service, lambda client: client.completions.create(**asked))

    post([vocab_size - 1])
    post(["Once"])
    for prompt, fields, why in (
        ([vocab_size], {}, f"holds token id {vocab_size}; the model's ids are 0 to {vocab_size - 1}"),
        ([[5], [5, vocab_size, 6]], {}, f"holds token id {vocab_size}"),
        ("", {"add_special_tokens": False}, "needs at least one token"),
    ):
        with pytest.raises(openai.BadRequestError, match=why) as refused:
            post(prompt, **fields)
        assert refused.value.param == "prompt"
    assert len(service.asked) == 2


def test_many_at_once(server: ServerProcess, llm: fastgen.LLM) -> None:
    texts = [f"{PROMPT} number {number}" for number in range(8)]
    expected = llm.generate(texts, max_new_tokens=10, temperature=0)

    async def run() -> list[Completion]:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
            calls = (
                client.completions.create(model=MODEL, prompt=text, max_tokens=10, temperature=0) for text in texts
            )
            return await asyncio.gather(*calls)

    assert [found.choices[0].text for found in asyncio.run(run())] == [output.text for output in expected]
