"""Ranks that are a process group, as those with a GPU each are: here by gloo, with interpreted Triton kernels."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fastgen
from fastgen.compile.backends.triton import TritonBackend
from fastgen.compile.capture.tape import LibraryCall, Tape
from fastgen.compile.host.group_ranks import GroupRanks, MeetingPoint, chosen_sums
from fastgen.errors import RankError
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.llm import LLM
from fastgen.runtime.ranks.leading import LeadingForward
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.runtime.step.step import Step
from tests.fast import cases
from tests.reference import randomise, save
from tests.runtime.ranks.models import VOCAB_SIZE, prompts, save_family
from tests.runtime.ranks.test_faults_ranks import followers, is_there, run_until_lost
from tests.runtime.test_same_answer_triton import OPTIONS, PROMPTS, SAMPLINGS, SIZES

NUM_SUMS = 1 + 2 * SIZES["num_hidden_layers"]  # of a step
SMALL: dict[str, Any] = OPTIONS | {"token_budget": 8}


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory in which ranks on a CPU meet, as ranks with a GPU each do."""
    (tmp_path / "meetings").mkdir()

    def meeting_point(device: object) -> MeetingPoint:
        return MeetingPoint("gloo", Path(tempfile.mkdtemp(dir=tmp_path / "meetings")) / "meeting", chosen_sums())

    monkeypatch.setattr("fastgen.runtime.arrangement._meeting_point", meeting_point)
    return tmp_path / "meetings"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**SIZES)
    return save(randomise(transformers.LlamaForCausalLM(config), seed=3), tmp_path_factory.mktemp("model"))


def answers(llm: LLM) -> tuple[list[list[int]], int]:
    """The tokens of all requests, and how many steps were launched before the tokens of the step before were known."""
    engine, num_ahead = llm._engine, 0
    assert engine is not None
    observe = engine.observers.ran

    def count(step: Step) -> None:
        nonlocal num_ahead
        num_ahead += step.is_ahead
        observe(step)

    engine.observers.ran = count  # type: ignore[method-assign]
    generations: list[Generation] = [engine.submit(*each) for each in zip(PROMPTS, SAMPLINGS, strict=True)]
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    return [each.output().token_ids for each in generations], num_ahead


@pytest.mark.slow
@pytest.mark.parametrize("sums", ["library", "symmetric", "in shared memory"])
def test_steps_run_ahead_and_have_their_sums(
    sums: str, model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fastgen.load(model, **SMALL) as llm:
        expected, num_ahead = answers(llm)
        assert num_ahead > 5
    if sums != "in shared memory":
        monkeypatch.setenv("FASTGEN_RANK_SUMS", sums)
        request.getfixturevalue("meetings")
    with fastgen.load(model, **SMALL, tensor_parallel=2) as llm:
        found, ahead = answers(llm)
        assert found == expected
        assert ahead == num_ahead
        engine = llm._engine
        assert engine is not None
        forward = engine.runner.forward
        assert isinstance(forward, LeadingForward)
        own = forward._own
        for graph in own._forwards.values():  # type: ignore[attr-defined]
            assert isinstance(graph, Tape)
            entries = [str(each) for each in graph.entries]
            kernel, num_exchanges = ("symmetric_sum", 0) if sums == "symmetric" else ("sum_parts", NUM_SUMS)
            assert sum(each.startswith(kernel) for each in entries) == NUM_SUMS
            assert entries.count("all_gather") == num_exchanges
        for graph in own._heads.values():  # type: ignore[attr-defined]
            calls = [str(each) for each in graph.entries if isinstance(each, LibraryCall)]
            assert calls.count("all_gather") == calls.count("broadcast") == 1


def test_a_group_answers_as_one_rank(meetings: Path, tmp_path: Path) -> None:
    directory = save_family("llama", tmp_path / "model")
    request = {"max_new_tokens": 3, "temperature": 0, "logprobs": VOCAB_SIZE, "prompt_logprobs": 0}
    with fastgen.load(directory, target="torch") as llm:
        expected = llm.generate(prompts(2), **request)
    with fastgen.load(directory, target="torch", tensor_parallel=2) as llm:
        found = llm.generate(prompts(2), **request)
        forward = llm._engine.runner.forward  # type: ignore[union-attr]
        assert isinstance(forward, LeadingForward)
        assert isinstance(forward._team._members.group, GroupRanks)
    assert not list(meetings.iterdir())
    for mine, other in zip(found, expected, strict=True):
        assert mine.error is None
        assert len(mine.token_ids) == 3
        row, same = mine.logprobs[0], other.logprobs[0]  # type: ignore[index]
        assert row.keys() == same.keys()
        assert max(abs(row[token_id] - same[token_id]) for token_id in row) < 1e-4
        pairs = zip(mine.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)  # type: ignore[index]
        assert all(abs(row[token_id] - same[token_id]) < 1e-4 for row, same in pairs for token_id in row)


@pytest.mark.parametrize("fault", cases([signal.SIGKILL, signal.SIGSTOP], fast=[]))
def test_a_lost_rank_ends_the_model(fault: signal.Signals, meetings: Path, tmp_path: Path) -> None:
    with fastgen.load(save_family("llama", tmp_path), tensor_parallel=2, target="torch") as llm:
        (process,) = followers(os.getpid())
        error, _ = run_until_lost(llm, fault)
        assert "rank 1 of 2" in error or fault == signal.SIGKILL
        assert "the model has to be loaded again" in error
    assert not is_there(process)
    assert not list(meetings.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_waited_for_in_memory_is_lost(
    fault: signal.Signals, meetings: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_RANK_SUMS", "symmetric")
    with fastgen.load(model, **SMALL, tensor_parallel=2) as llm:
        (process,) = followers(os.getpid())
        error, _ = run_until_lost(llm, fault, PROMPTS[0], 50)
        assert "the model has to be loaded again" in error
    assert not is_there(process)
    assert not list(meetings.iterdir())


def test_how_ranks_add_is_chosen_before_steps_are_captured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For steps of all sizes that are captured."""
    asked: list[tuple[Any, ...]] = []

    def choose_sums(self: TritonBackend, *arguments: Any) -> None:
        asked.append(arguments)
        raise InterruptedError

    monkeypatch.setattr(TritonBackend, "choose_sums", choose_sums)
    with pytest.raises(InterruptedError):
        fastgen.load(model, **SMALL)
    assert asked == [(captured_sizes(8), SIZES["hidden_size"], torch.device("cpu"))]


@pytest.mark.slow
def test_a_rank_that_never_comes_ends_the_load(meetings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it in a library, which would wait for half an hour."""
    monkeypatch.setattr("fastgen.runtime.arrangement.__version__", "0.0")
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: .*this rank is of version"):
        fastgen.load(save_family("llama", tmp_path), tensor_parallel=2)
    assert not followers(os.getpid())
    assert not list(meetings.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("sums", ["library", "symmetric", "measured"])
def test_ranks_with_a_gpu_each(sums: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    monkeypatch.setenv("FASTGEN_RANK_SUMS", sums)
    options = SMALL | {"device": "cuda"}
    with fastgen.load(model, **options) as llm:
        expected, num_ahead = answers(llm)
    with fastgen.load(model, **options, tensor_parallel=2) as llm:
        found, ahead = answers(llm)
        again = [answers(llm)[0] for _ in range(2)]
    assert again == [found, found], "sums have the same bits in each run"
    assert ahead == num_ahead
    assert found == expected
    with fastgen.load(model, **options, tensor_parallel=2) as llm:
        error, _ = run_until_lost(llm, signal.SIGKILL, PROMPTS[0], 50)
        assert "rank 1 of 2" in error
