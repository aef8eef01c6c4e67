"""A prompt that leaves no room for an answer is refused before its ids are looked at, or sent to the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.engine.messages import Submit
from fastgen.serving.http.generate import naming_the_field
from fastgen.serving.http.openai.run import check_prompt
from fastgen.serving.refusals import BadRequestError
from fastgen.serving.service import Service
from tests.serving.fake_engine import FACTS, fake_processes
from tests.serving.scripted import scripted_codec

SAMPLING = SamplingParams(max_new_tokens=1)


class Unread(list[int]):
    """Token ids that nothing may look at."""

    def __iter__(self) -> Any:
        pytest.fail("the ids were read")


def test_a_prompt_as_long_as_the_model_allows_for_both_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service({"model": "tiny-llama"})
    service._codec = scripted_codec()
    too_long = Unread([5] * FACTS.max_model_len)

    async def run() -> None:
        async with fake_processes(service.engine, monkeypatch) as started:  # type: ignore[arg-type]
            await service.engine.start()
            for refused in (service.submit(too_long, SAMPLING, is_stream=False), service.refusal(too_long, SAMPLING)):
                with pytest.raises(
                    BadRequestError, match=r"4096 tokens, max_model_len is 4096; shorten the prompt"
                ) as why:
                    await refused
                assert (why.value.param, why.value.code) == ("prompt", "context_length_exceeded")
            await service.submit(too_long[1:], SAMPLING, is_stream=False)
            assert len((await started[0].next(Submit)).prompt_ids) == FACTS.max_model_len - 1

    asyncio.run(run())


def test_its_length_is_compared_before_its_ids() -> None:
    service: Any = SimpleNamespace(facts=FACTS)
    with pytest.raises(BadRequestError, match="has 4096 tokens"):
        check_prompt(service, Unread([5] * FACTS.max_model_len), "prompt")


def test_the_code_of_a_prompt_that_is_too_long_is_kept_where_its_field_is_named() -> None:
    with pytest.raises(BadRequestError) as refused, naming_the_field("prompt"):
        raise BadRequestError("it is too long", code="context_length_exceeded")
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
