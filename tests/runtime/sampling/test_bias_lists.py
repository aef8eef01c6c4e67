"""Biases as kernels take them: made once for the requests of a call, and never of another's."""

from __future__ import annotations

import numpy as np

from fastgen.compile.ops.sampling.cpp import NO_BIASES, Biases
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.sampling.sampled_rows import BiasLists


def as_dict(biases: Biases) -> dict[int, float]:
    assert (biases[0].dtype, biases[1].dtype) == (np.int32, np.float32)
    return dict(zip(biases[0].tolist(), biases[1].tolist(), strict=True))


def test_the_requests_of_a_call_share_their_list() -> None:
    lists = BiasLists(10)
    given = SamplingParams(logit_bias={3: 1.5, 9: -2.0, 10: 5.0}).logit_bias
    first = lists.of(given)
    assert as_dict(first) == {3: 1.5, 9: -2.0}, "10 is beyond the head"
    first_with_ends = lists.of(given, frozenset({9, 2, 11}))
    assert as_dict(first_with_ends) == {3: 1.5, 9: -np.inf, 2: -np.inf}
    assert lists.of(given) is first
    assert lists.of(given, frozenset({11, 2, 9})) is first_with_ends


def test_other_biases_and_other_ends_make_other_lists() -> None:
    lists = BiasLists(10)
    one, equal, other = (SamplingParams(logit_bias=given).logit_bias for given in ({3: 1.0}, {3: 1.0}, {3: 2.0}))
    for given in (one, equal, other, one):
        assert as_dict(lists.of(given)) == given
        for ends in (frozenset({3}), frozenset({4}), frozenset({3, 4})):
            assert as_dict(lists.of(given, ends)) == {**given, **dict.fromkeys(ends, -np.inf)}


def test_nothing_is_one_list() -> None:
    lists = BiasLists(10)
    assert lists.of({}) is lists.of({12: 1.0}) is lists.of({}, frozenset({12})) is NO_BIASES
