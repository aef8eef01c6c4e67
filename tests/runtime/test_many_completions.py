"""A request with very many completions costs no more each than one with few."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.runtime.answers.generation import Completion, Generation
from fastgen.runtime.requests.request import Request
from fastgen.runtime.requests.sampling_params import SamplingParams


class Counted(list[Any]):
    """Counts how often an item is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))


@pytest.mark.parametrize("descending", [False, True], ids=["in-order", "last-first"])
def test_whether_all_are_finished_is_asked_after_each(descending: bool) -> None:
    num_completions = 2000
    request = Request(0, [3, 1, 4], SamplingParams(n=num_completions), arrival_s=0.0)
    completions = Counted(Completion(sequence, None) for sequence in request.sequences)
    generation = Generation(request)
    generation._completions = completions
    said = []
    for completion in list(request.sequences)[:: -1 if descending else 1]:
        list.__getitem__(completions, completion.index).finish("cancelled")
        said.append(generation.finished)
    assert said == [False] * (num_completions - 1) + [True]
    assert completions.looks <= 3 * num_completions
