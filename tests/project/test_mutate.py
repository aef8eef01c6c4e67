"""The tool that makes small mistakes and asks whether the tests notice: ``python -m tools.mutate``."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutate
from tools.mutate import ROOT, draw
from tools.mutations import is_valid, mutations_of
from tools.nearest_tests import Nearest

PYTHON = '''
"""A docstring with 1 < 2."""
def first(xs: list[int], limit: int = 3) -> bool:  # 4 > 3
    """And another with 5 + 6."""
    assert limit > 0
    if not xs or limit == 7:
        _log.warning("%d", 8)
        raise ValueError(f"{limit - 9}")
    self.count += 1
    self.clear()
    return min(xs) is not None if True else xs[0] + limit
'''
TRITON = """
{# 1 < 2 #}
{% if P % block_n == 0 %}
# 3 + 4
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    block = tl.load(table_ptr).to(tl.int64)
    tl.store(out_ptr + 5, acc)
{% endif %}
"""
CPP = """
// 1 < 2
#include "numbers.h"
    if (first >= last || last % 8) return;
    store(scores, select(seen, a, b));
"""


def changes(path: str, text: str) -> set[tuple[str, str, str]]:
    return {(each.operator, text[each.start : each.end], each.new) for each in mutations_of(path, text)}


def test_python_is_changed_where_it_does_something() -> None:
    assert changes("x.py", PYTHON) == {
        ("constant", "3", "4"),
        ("constant", "3", "2"),
        ("logic", "or", "and"),
        ("comparison", "==", "!="),
        ("constant", "7", "8"),
        ("constant", "7", "6"),
        ("negation", "not xs or limit == 7", "not (not xs or limit == 7)"),
        ("negation", "not xs", "(xs)"),
        ("statement", 'raise ValueError(f"{limit - 9}")', "pass"),
        ("arithmetic", "+=", "-="),
        ("constant", "1", "2"),
        ("constant", "1", "0"),
        ("statement", "self.count += 1", "pass"),
        ("statement", "self.clear()", "pass"),
        ("statement", "return min(xs) is not None if True else xs[0] + limit", "return None"),
        ("function", "min", "max"),
        ("comparison", "is not", "is"),
        (
            "branches",
            "min(xs) is not None if True else xs[0] + limit",
            "xs[0] + limit if True else min(xs) is not None",
        ),
        ("constant", "True", "False"),
        ("constant", "0", "1"),
        ("constant", "0", "-1"),
        ("arithmetic", "+", "-"),
    }


def test_templates_of_triton_are_changed_with_their_conditions() -> None:
    assert changes("x.py.j2", TRITON) == {
        ("arithmetic", "%", "//"),
        ("comparison", "==", "!="),
        ("constant", "0", "1"),
        ("negation", "MASKED", "not (MASKED)"),
        ("branches", ' score, float("-inf")', ' float("-inf"), score'),
        ("width", ".to(tl.int64)", ""),
        ("statement", "tl.store(out_ptr + 5, acc)", "pass"),
        ("arithmetic", "+", "-"),
        ("constant", "5", "6"),
        ("constant", "5", "4"),
    }


def test_templates_of_cpp_are_changed_but_no_comment_and_no_include() -> None:
    assert changes("x.h", CPP) == {
        ("comparison", ">=", ">"),
        ("logic", "||", "&&"),
        ("arithmetic", "%", "/"),
        ("constant", "8", "9"),
        ("constant", "8", "7"),
        ("negation", "first >= last || last % 8", "!(first >= last || last % 8)"),
        ("branches", " a, b", " b, a"),
        ("statement", "store(scores, select(seen, a, b));", ";"),
    }


@pytest.mark.slow  # reads every source
def test_every_source_of_engine_kernels_and_server_has_mutations_that_a_seed_chooses() -> None:
    drawn = list(itertools.islice(draw(ROOT, random.Random(3)), 80))
    assert drawn == list(itertools.islice(draw(ROOT, random.Random(3)), 80))
    assert len(set(drawn)) == 80
    assert {each.area for each in drawn} == set(mutate.AREAS)
    for each in drawn:
        before = (ROOT / each.path).read_text()
        after = each.mutation.apply(before)
        assert after != before
        assert is_valid(each.path, after)
    (only,) = {each.path for each in itertools.islice(draw(ROOT, random.Random(3), "fastgen/runtime/engine.py"), 5)}
    assert only == "fastgen/runtime/engine.py"


@pytest.mark.slow  # reads every file of the repository
def test_the_nearest_tests_come_first() -> None:
    nearest = Nearest(ROOT)
    assert "tests/runtime/test_run_ahead.py" in nearest.tests("fastgen/runtime/step/run_ahead.py")[:2]
    assert nearest.tests("fastgen/serving/http/openai/chat.py")[0] == "tests/serving/test_openai_chat.py"
    assert nearest.tests("fastgen/runtime/scheduling/waiting_queue.py")[0].endswith("test_waiting_queue.py")
    of_triton = nearest.tests("fastgen/compile/ops/attention/templates/attention.py.j2")[:5]
    assert of_triton[0] == "tests/compile/test_triton_attention.py"
    assert "tests/compile/test_attention_windows.py" in of_triton
    header = "fastgen/compile/ops/attention/templates/attention_rows.h"
    assert nearest.tests(header)[0] == "tests/compile/test_cpp_attention.py"
    assert "tests/compile/test_cpp_attention.py" not in of_triton
    of_heads = nearest.tests("fastgen/compile/templates/heads.py.j2")[:8]
    assert "tests/compile/test_triton_qkv.py" in of_heads
    assert "tests/compile/test_triton_moe.py" not in of_heads
    assert "tests/compile/test_kernel_digests.py" not in nearest.tests("fastgen/compile/ops/norm/templates/norm.py.j2")


# ---- a run


MODULE = """
def is_full(count: int) -> bool:
    return count >= 3


def untested(count: int) -> int:
    return count
"""
TEST = """
from fastgen.runtime.room import is_full

def test_a_room_is_full_with_three():
    assert [is_full(count) for count in range(5)] == [False, False, False, True, True]
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one module and one test of half of it."""
    tree = tmp_path / "tree"
    files = {"fastgen/runtime/room.py": MODULE, "tests/runtime/test_room.py": TEST}
    files |= dict.fromkeys(("fastgen/__init__.py", "fastgen/runtime/__init__.py", "tests/__init__.py"), "")
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    monkeypatch.setattr(mutate, "ROOT", tree)
    return tree


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> list[dict[str, object]]:
    monkeypatch.setattr(sys, "argv", ["mutate", "--output", str(output), *arguments])
    mutate.main()
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.slow  # starts a run of tests for each mutation
def test_what_a_test_notices_is_rejected_and_the_rest_survives(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "found.jsonl"
    first = run(monkeypatch, output, "--number", "2")
    everything = run(monkeypatch, output, "--number", "99", "--resume")
    assert everything[:2] == first
    assert [line["number"] for line in everything] == list(range(5))
    test = "tests/runtime/test_room.py::test_a_room_is_full_with_three"
    changes = [(line["line"], str(line["diff"]).splitlines()[3].strip("+ ")) for line in everything]
    verdicts = {change: (line["verdict"], line["test"]) for change, line in zip(changes, everything, strict=True)}
    assert verdicts == {
        (3, "return count > 3"): ("rejected", test),
        (3, "return count >= 4"): ("rejected", test),
        (3, "return count >= 2"): ("rejected", test),
        (3, "return None"): ("rejected", test),
        (7, "return None"): ("survived", ""),
    }
    assert (tree / "fastgen/runtime/room.py").read_text() == MODULE


def test_no_test_begins_once_the_budget_is_spent(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = run(monkeypatch, tmp_path / "found.jsonl", "--number", "1", "--seconds", "0")
    assert (line["verdict"], line["num_passed"]) == ("survived", 0)


def test_tests_that_cannot_run_at_all_reject_nothing(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "tests/conftest.py").write_text("def pytest_no_such_hook():\n    pass\n")
    with pytest.raises(RuntimeError, match=r"pytest ends with 3 without a mutation: tests/runtime/test_room\.py"):
        run(monkeypatch, tmp_path / "found.jsonl", "--number", "1")


def test_a_record_is_not_written_over(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "found.jsonl"
    output.write_text("{}\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, output, "--number", "1")
    assert output.read_text() == "{}\n"
