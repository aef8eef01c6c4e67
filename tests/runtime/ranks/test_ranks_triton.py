"""Two ranks with every Triton kernel interpreted: sums over ranks are entries of the captured steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import fastgen
from fastgen.compile.capture.tape import LibraryCall, Tape
from fastgen.runtime.ranks.leading import LeadingForward
from tests.reference import randomise, save
from tests.runtime.test_same_answer_triton import OPTIONS, PROMPTS, SAMPLINGS, SIZES


@pytest.mark.slow
def test_a_captured_step_has_its_sums(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    directory = save(randomise(transformers.LlamaForCausalLM(config), seed=3), tmp_path)
    sizes = OPTIONS | {"token_budget": 8}
    with fastgen.load(directory, **sizes) as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS[:1], SAMPLINGS[:1])]
    with fastgen.load(directory, **sizes, tensor_parallel=2) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS[:1], SAMPLINGS[:1])] == expected
        engine = llm._engine
        assert engine is not None
        forward = engine.runner.forward
        assert isinstance(forward, LeadingForward)
        own = forward._own
        for graph in own._forwards.values():
            assert isinstance(graph, Tape)
            calls = [str(each) for each in graph.entries if isinstance(each, LibraryCall)]
            assert calls.count("all_reduce") == 1 + 2 * SIZES["num_hidden_layers"]
        for graph in own._heads.values():
            assert [str(each) for each in graph.entries].count("gather") == 1
