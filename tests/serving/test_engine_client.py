"""The engine in a process of its own gives what it gives in this one."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

import fastgen
from fastgen.errors import InvalidArgumentError
from fastgen.runtime.sampling_params import SamplingParams
from fastgen.serving.messages import encoder, pack_sampling, unpack_sampling
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service


def test_answers_are_those_of_the_library() -> None:
    samplings = [
        SamplingParams(max_new_tokens=12),
        SamplingParams(max_new_tokens=12, temperature=0.8, seed=5, n=2, logprobs=1, prompt_logprobs=0),
        SamplingParams(max_new_tokens=40, stop=("a",), min_new_tokens=4),
        SamplingParams(max_new_tokens=6, beam_width=3, n=2),
        SamplingParams(max_new_tokens=40, response_format={"type": "regex", "pattern": "[a-z]{3} [a-z]{3}"}),
    ]
    prompt = "Once upon a time"

    async def run() -> list[list[fastgen.GenerationOutput]]:
        service = Service({"model": "tiny-llama"})
        await service.start()
        try:
            prompt_ids = service.codec.encode(prompt)
            outputs = []
            for is_stream in (False, True):
                running = [
                    await service.submit(prompt_ids, each, is_stream=is_stream, request_id="") for each in samplings
                ]
                outputs.append([await each.output() for each in running])
            return outputs
        finally:
            await service.stop()

    whole, streamed = asyncio.run(run())
    with fastgen.load("tiny-llama") as llm:
        expected = [llm.generate(prompt, each) for each in samplings]
    for outputs in (whole, streamed):
        for got, wanted in zip(outputs, expected, strict=True):
            assert [_answer(each) for each in got.completions] == [_answer(each) for each in wanted.completions]
            assert got.prompt_logprobs == wanted.prompt_logprobs
            assert len(got.metrics.gaps_s) == len(wanted.metrics.gaps_s)


def _answer(output: fastgen.GenerationOutput) -> tuple[object, ...]:
    return (output.index, output.text, output.token_ids, output.finish_reason, output.logprobs, output.score)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**70 + 3, -(2**70)])
def test_any_integer_is_a_seed(seed: int) -> None:
    packed = msgspec.msgpack.decode(encoder.encode(pack_sampling(SamplingParams(temperature=1.0, seed=seed))))
    assert unpack_sampling(packed) == SamplingParams(temperature=1.0, seed=seed % 2**64)


@pytest.mark.parametrize("name", ["port", "grpc_port"])
@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port_is_refused(name: str, port: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name}={port}: expected a port"):
        ServeOptions(**{name: port})
