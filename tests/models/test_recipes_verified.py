"""Every shipped recipe passes ``fastgen verify``; the number of comparisons goes into the matrix of proofs."""

from __future__ import annotations

import pytest

from fastgen.verify import verify
from tests.matrix import Record
from tests.shuffled import shipped_texts

# Architectures that transformers does not know.
NO_REFERENCE = {"internlm2"}
ENGINE = {"alone", "whole", "chunked", "kernels"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(shipped_texts().keys() - NO_REFERENCE))
def test_every_recipe_passes_verify(name: str, record: Record) -> None:
    report = verify(name)
    assert report.passed, report.finding
    assert report.checks.keys() >= ENGINE
    for check, result in report.checks.items():
        record(name, "engine" if check in ENGINE else "verify", [result.num_compared, result.largest])
