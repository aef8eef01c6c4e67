"""An engine in its own process gives the same results as one in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

import fastgen
from fastgen.compile.host.parent import end_with
from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.models.checkpoint.hub import locate
from fastgen.runtime.engine import Engine
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.response_format import ResponseFormat
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.mask_threads import MaskThreads
from fastgen.runtime.sampling.matcher import CompiledFormat, Constraint
from fastgen.runtime.scheduling.policies import DynamicBatching
from fastgen.runtime.simulated import SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.text.codec import TextCodec
from fastgen.serving.engine import formats as formats_of_engine
from fastgen.serving.engine import messages
from fastgen.serving.engine import process as engine_process
from fastgen.serving.engine.client import EngineClient
from fastgen.serving.engine.formats import end_large_formats
from fastgen.serving.engine.messages import (
    Ask,
    Cancel,
    Check,
    EngineFacts,
    Reply,
    Report,
    RequestDecoder,
    RequestEncoder,
    SamplingPacker,
    SamplingUnpacker,
    Submit,
    encoder,
    has_come,
    to_engine,
    to_server,
)
from fastgen.serving.isolated.encoding import encoder as encoder_messages
from fastgen.serving.isolated.grammars import trial
from fastgen.serving.isolated.processes import HelperEndedError, HelperProcesses
from fastgen.serving.isolated.templates import renderer
from fastgen.serving.monitoring import live
from fastgen.serving.options import ServeOptions
from fastgen.serving.service import Service
from tests.runtime.sampling.timed_masks import TimedMasks
from tests.serving.fake_engine import FACTS


def test_answers_are_those_of_the_library() -> None:
    samplings = [
        SamplingParams(max_new_tokens=12),
        SamplingParams(max_new_tokens=12, temperature=0.8, seed=5, n=2, logprobs=1, prompt_logprobs=0),
        SamplingParams(max_new_tokens=40, stop=("a",), min_new_tokens=4),
        SamplingParams(max_new_tokens=6, beam_width=3, n=2),
        SamplingParams(max_new_tokens=6, logprobs=2),
        SamplingParams(max_new_tokens=6, prompt_logprobs=1),
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
                running = [await service.submit(prompt_ids, each, is_stream=is_stream) for each in samplings]
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
            assert _listed(got.prompt_logprobs) == wanted.prompt_logprobs
            assert len(got.metrics.gaps_s) == len(wanted.metrics.gaps_s)


def test_it_is_ready_once_texts_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    service, seen = Service({"model": "tiny-llama"}), list[str]()

    async def start() -> SimpleNamespace:
        service.engine.process.state = "ready"
        return SimpleNamespace(directory=locate("tiny-llama"), max_model_len=512, tokenizer_class="TokenizersBackend")

    def read(directory: Path, config: object, *, tokenizer_class: str) -> TextCodec:
        assert tokenizer_class == "TokenizersBackend"
        seen.append(service.state)
        return TextCodec(None, eos_token_ids=frozenset(), default_sampling=SamplingParams())

    monkeypatch.setattr(service.engine, "start", start)
    monkeypatch.setattr(TextCodec, "from_checkpoint", read)
    asyncio.run(service.start())
    assert [*seen, service.state] == ["starting", "ready"]


@pytest.mark.parametrize(("is_here", "asked"), [(True, []), (False, [("of/another", "v2", False)])])
def test_texts_are_read_where_the_engine_has_its_files_or_where_the_models_name_leads(
    monkeypatch: pytest.MonkeyPatch, is_here: bool, asked: list[tuple[object, ...]]
) -> None:
    service, found = Service({"model": "of/another", "revision": "v2"}), list[object]()
    directory = locate("tiny-llama")

    async def start() -> EngineFacts:
        return msgspec.structs.replace(FACTS, directory=str(directory) if is_here else "/nowhere")

    def find(model: str, *, revision: str | None = None, with_weights: bool = True) -> Path:
        found.append((model, revision, with_weights))
        return directory

    def read(where: Path, config: object, *, tokenizer_class: str) -> TextCodec:
        assert where == directory
        return TextCodec(None, eos_token_ids=frozenset(), default_sampling=SamplingParams())

    monkeypatch.setattr(service.engine, "start", start)
    monkeypatch.setattr("fastgen.serving.service.hub.locate", find)
    monkeypatch.setattr(TextCodec, "from_checkpoint", read)
    asyncio.run(service.start())
    assert found == asked


def test_what_may_take_too_long_is_done_by_processes_that_end_with_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, begun, ended = Service({"model": "of another place"}), list[str](), list[str]()

    async def start() -> EngineFacts:
        return msgspec.structs.replace(FACTS, directory=str(locate("tiny-llama")), vocab_size=1536, max_model_len=512)

    def ask(processes: HelperProcesses, request: bytes) -> bytes:
        raise HelperEndedError(-signal.SIGPROF)

    monkeypatch.setattr(service.engine, "start", start)
    monkeypatch.setattr("fastgen.serving.service.may_encode_slowly", lambda tokenizer: True)
    monkeypatch.setattr(HelperProcesses, "ask", ask)
    monkeypatch.setattr(HelperProcesses, "start", lambda processes: begun.append(processes._command[-1]))
    monkeypatch.setattr(HelperProcesses, "close", lambda processes: ended.append(processes._command[-1]))

    async def run() -> str | None:
        await service.start()
        assert (service.codec.max_tokens, service.codec.waits_to_encode) == (512, True)
        with pytest.raises(InvalidArgumentError, match="cannot encode this text: it took more than 2 s"):
            service.codec.encode("Once")
        with pytest.raises(InvalidArgumentError, match="refuses this conversation: it took more than 2 s"):
            service.codec.encode_chat([{"role": "user", "content": "Hello"}])
        refusal = await service.refusal([5], SamplingParams(response_format=ResponseFormat("regex", "a")))
        await service.stop()
        return refusal

    refusal = asyncio.run(run())
    assert refusal == "response_format (regex) is refused: it takes more than 0.5 s of processor time to compile"
    modules = [f"fastgen.serving.isolated.{name}.process" for name in ("templates", "encoding", "grammars")]
    assert (begun, ended) == (modules[:2], modules)
    assert service.state == "draining"


@pytest.mark.parametrize("policy", [None, DynamicBatching(batch_size=3)])
def test_a_policy_that_is_no_json_is_left_as_it_is(policy: object) -> None:
    arguments = {"model": "m", "policy": policy}
    assert engine_process._with_policy(arguments) is arguments


def test_a_policy_is_made_of_its_json() -> None:
    policy = {"name": "dynamic", "batch_size": 3, "max_delay_s": 2}
    found = engine_process._with_policy({"model": "m", "policy": policy})
    assert found["model"] == "m"
    assert isinstance(found["policy"], DynamicBatching)
    assert (found["policy"].batch_size, found["policy"].max_delay_s) == (3, 2)


def _answer(output: fastgen.GenerationOutput) -> tuple[object, ...]:
    logprobs = _listed(output.logprobs)
    return (output.index, output.text, output.token_ids, output.finish_reason, logprobs, output.score)


def _listed(logprobs: Any) -> list[Any] | None:
    return None if logprobs is None else [*logprobs]


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**70 + 3, -(2**70)])
def test_any_integer_is_a_seed(seed: int) -> None:
    packed = SamplingPacker().pack(SamplingParams(temperature=1.0, seed=seed))
    assert SamplingUnpacker().unpack(packed) == SamplingParams(temperature=1.0, seed=seed % 2**64)


def test_equal_sampling_parameters_are_one_object_as_long_as_a_request_has_them() -> None:
    packer, unpacker = SamplingPacker(), SamplingUnpacker()
    first, second = (SamplingParams(temperature=1.0, stop_token_ids=[each]) for each in (5, 6))
    packed = [bytes(packer.pack(each)) for each in (first, first, second, first, SamplingParams())]
    assert packed[0] == packed[1] == packed[3]
    found = [unpacker.unpack(msgspec.Raw(each)) for each in packed]
    assert found == [first, first, second, first, SamplingParams()]
    assert found[0] is found[1] is found[3]
    del found
    assert not unpacker._shared


def test_sampling_parameters_are_sent_once_for_the_requests_of_a_call() -> None:
    packer, sent, came, unpacker = SamplingPacker(), RequestEncoder(), RequestDecoder(to_engine), SamplingUnpacker()
    one, other = (SamplingParams(temperature=1.0, stop_token_ids=[*range(each, 1000)]) for each in (5, 6))
    given = [one, one, one, SamplingParams(), one, one, other, other, SamplingParams(), SamplingParams()]
    messages = [
        Submit(number, [5], packer.pack(sampling), True) if number % 3 else Check(number, [5], packer.pack(sampling))
        for number, sampling in enumerate(given)
    ]
    messages[5:5] = [Cancel(0), Ask(1, "live")]
    encoded = [sent.encode(message) for message in messages]
    assert [len(each) > 1000 for each in encoded].count(True) == 3, "one twice, since another came between, and other"
    found = [came.decode(each) for each in encoded]
    assert [type(each) for each in found] == [type(each) for each in messages]
    requests = [each for each in found if isinstance(each, Submit | Check)]
    assert [unpacker.unpack(each.sampling) for each in requests] == given
    assert [each.number for each in requests] == [*range(10)]
    assert requests[0].sampling is requests[2].sampling


def test_an_engine_that_is_started_again_is_sent_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    process = an_engine(SimpleNamespace()).process
    packed = SamplingPacker().pack(SamplingParams(seed=5))
    monkeypatch.setattr(process, "send_encoded", lambda encoded: sent.append(to_engine.decode(encoded)))

    async def run() -> None:
        for _ in range(2):
            process._open_socket()
            for number in (1, 2):
                process.send(Submit(number, [5], packed, True))
            process._close_socket()

    asyncio.run(run())
    assert [bytes(each.sampling) == bytes(packed) for each in sent] == [True, False, True, False]


def an_engine(watcher: Any) -> EngineClient:
    return EngineClient({"model": "tiny-llama"}, watcher, timeout_s=1.0)


def test_counters_that_come_after_their_engine_has_ended_are_not_taken_for_the_next_ones() -> None:
    taken: list[object] = []
    engine = an_engine(SimpleNamespace(engine_counted=taken.append))

    async def reply(what: str, kind: object) -> str:
        engine.process.state = states.pop()
        return engine.process.state

    states: list[Any] = ["restarting", "ready"]
    engine.ask = reply  # type: ignore[method-assign, assignment]

    async def run() -> None:
        await engine.count()
        await engine.count()
        await engine.stop()

    asyncio.run(run())
    assert taken == ["ready"]


def test_a_process_that_the_system_refuses_is_an_engine_that_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(24, "Too many open files")

    async def run() -> None:
        engine = an_engine(None)
        try:
            with pytest.raises(FastgenError, match=r"the engine's process cannot be started: .*Too many open files"):
                await engine.start()
        finally:
            await engine.stop()

    monkeypatch.setattr("fastgen.serving.engine.supervisor.subprocess.Popen", refuse)
    asyncio.run(run())


def test_a_process_whose_parent_has_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "one that cannot end it by itself")
    end_with(os.getppid())
    with pytest.raises(SystemExit):
        end_with(os.getpid())


@pytest.mark.parametrize("name", ["port", "grpc_port"])
@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port_is_refused(name: str, port: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name}={port}: expected a port"):
        ServeOptions(**{name: port})


def test_prompts_are_logged_with_requests_only() -> None:
    with pytest.raises(InvalidArgumentError, match="log_prompts needs log_requests"):
        ServeOptions(log_prompts=True)


def test_what_fails_in_the_engine_for_one_request_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request cannot be queued through no fault of its own, and the counters cannot be reported."""
    engine = SimulatedServer(
        StepCost.linear(step_s=0.01, token_s=0.0), token_budget=64, max_num_seqs=4, num_blocks=64
    ).engine
    note = engine.recorder.arrived

    def note_unless_broken(request: Request) -> None:
        if list(request.prompt_ids) == [13]:
            raise ZeroDivisionError("bad luck")
        note(request)

    def broken(engine: Engine) -> None:
        raise OSError("no counters")

    monkeypatch.setattr(engine.recorder, "arrived", note_unless_broken)
    monkeypatch.setitem(engine_process.ANSWERS, "metrics", broken)
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://engine")
        theirs.connect("inproc://engine")
        for message in (
            Submit(1, [5, 6], {"max_new_tokens": 3}, True),
            Submit(2, [13], {}, True),
            Submit(3, [5], {"max_new_tokens": 2}, False),
            Ask(4, "metrics"),
        ):
            ours.send(encoder.encode(message))
        told: list[object] = []
        ends = 0

        def listen() -> bool:
            """Between steps. Whether all has come."""
            nonlocal ends
            while has_come(ours):
                told.append(to_server.decode(ours.recv()))
                if isinstance(told[-1], Report):
                    ends += sum(progress.end is not None for progress in told[-1].progress)
            return ends == 2

        engine_process.EngineLoop(engine, theirs, is_orphan=listen).run()
    reports = [message for message in told if isinstance(message, Report)]
    (refused,) = [refused for report in reports for refused in report.refused]
    assert (refused.number, refused.is_failure) == (2, True)
    assert "bad luck" in refused.error
    (reply,) = [message for message in told if isinstance(message, Reply)]
    assert (reply.number, reply.error) == (4, "OSError: no counters")
    num_tokens = {1: 0, 3: 0}
    for report in reports:
        for number in report.tokens[::2]:
            num_tokens[number] += 1
        for progress in report.progress:
            num_tokens[progress.number] += len(progress.token_ids)
            if progress.end is not None:  # told at once, so its first token is as long ago as its gaps
                assert progress.end.first_token_ago_s == pytest.approx(sum(progress.end.metrics.gaps_s))
    assert num_tokens == {1: 3, 3: 2}
    assert not engine.has_work  # nothing is left of the one that could not be queued


@pytest.mark.parametrize("module", [messages, live, encoder_messages, trial, renderer])
def test_messages_do_not_repeat_the_names_of_their_fields(module: ModuleType) -> None:
    found = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    assert found
    by_name = {each.__name__ for each in found if not each.__struct_config__.array_like}
    assert by_name <= {"Struct", "LiveGaps", "LiveBlocks", "LiveView"}, "these are told once a view"


def test_a_message_to_the_engine_is_its_name_and_its_values() -> None:
    told = msgspec.msgpack.decode(encoder.encode(Submit(7, [5, 6], {"n": 2}, is_stream=True)))
    assert told == ["submit", 7, [5, 6], {"n": 2}, True]


def test_a_question_that_nobody_waits_for_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine compiles no format for it then."""
    sent: list[object] = []
    client = EngineClient.__new__(EngineClient)
    client._asked, client._numbers, client._packer = {}, iter(range(7, 20)), SamplingPacker()
    client.process = SimpleNamespace(send=sent.append, state="ready")  # type: ignore[assignment]
    monkeypatch.setattr(EngineClient, "check_ready", lambda self: None)
    monkeypatch.setattr(EngineClient, "state", "ready")

    async def run() -> None:
        asking = asyncio.create_task(client.refusal([5], SamplingParams()))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        answered = asyncio.create_task(client.refusal([5], SamplingParams()))
        await asyncio.sleep(0)
        client.engine_sent(Reply(8, msgspec.Raw(encoder.encode(None)), None), b"")
        assert await answered is None

    asyncio.run(run())
    assert [type(each) for each in sent] == [Check, Cancel, Check]
    assert isinstance(sent[1], Cancel)
    assert sent[1].number == 7


def test_all_requests_with_a_format_that_is_too_large_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run, and those that wait for a slot."""
    engine: Any = SimulatedServer(
        StepCost.linear(step_s=0.01, token_s=0.0), token_budget=64, max_num_seqs=2, num_blocks=64
    ).engine
    source = TimedMasks([0.0] * 10_000)
    formats = [CompiledFormat(ResponseFormat("regex", text), source) for text in "ab"]
    generations = [engine.submit([5, 6], SamplingParams(max_new_tokens=50, ignore_eos=True)) for _ in range(6)]
    for number, each in enumerate(generations):
        if number < 5:
            each.request.constraint = Constraint(
                formats[number % 2], source, MaskThreads(), source.all_tokens, min_new_tokens=0
            )
    engine.step()
    assert engine.scheduler.num_waiting == 4
    engine.grammars = SimpleNamespace(shed=lambda: formats[0])
    end_large_formats(engine, generations)
    assert [each.finished for each in generations] == [True, False, True, False, True, False]
    (completion,) = generations[0].completions
    assert (completion.finish_reason, completion.error) == ("error", formats_of_engine._TOO_LARGE)
    engine.grammars = SimpleNamespace(shed=lambda: None)
    end_large_formats(engine, generations)
    engine.grammars = None
    end_large_formats(engine, generations)
    while engine.has_work:
        engine.step()
    assert all(each.finished for each in generations)


def test_the_memory_of_formats_is_looked_at_with_each_status(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = SimulatedServer(
        StepCost.linear(step_s=0.01, token_s=0.0), token_budget=64, max_num_seqs=4, num_blocks=64
    ).engine
    looks, turns = list[int](), count()
    engine.grammars = SimpleNamespace(
        prepare=lambda: None, slots_are_wanted=lambda are_wanted: None, shed=lambda: looks.append(1)
    )
    monkeypatch.setattr(engine_process, "STATUS_S", 0.0)
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://engine")
        theirs.connect("inproc://engine")
        ours.send(encoder.encode(Submit(1, [5, 6], {"max_new_tokens": 20, "ignore_eos": True}, True)))
        engine_process.EngineLoop(engine, theirs, is_orphan=lambda: next(turns) == 5).run()
    assert len(looks) == 5
