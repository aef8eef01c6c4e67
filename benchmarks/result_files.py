"""The files of results: named by kind and date, and by a number from the second of a day on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def files(results: Path, kind: str) -> list[Path]:
    """Returns the files of a kind, such as ``scheduler``, by date and number, the newest last."""
    found = [each for each in results.glob(f"{kind}*.json") if each.stem[len(kind) :].lstrip("_0123456789-") == ""]
    return sorted(found, key=lambda each: [int(number) for number in re.findall(r"\d+", each.stem[len(kind) :])])


def next_file(results: Path, kind: str, date: str) -> Path:
    """Returns the path of a file of a kind that is not there yet, with a number where the day has one already."""
    numbers = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    paths = (results / f"{kind}_{date}{number}.json" for number in numbers)
    return next(path for path in paths if not path.exists())


def build(facts: Mapping[str, Any]) -> str:
    """Writes which build the ``facts`` of a result say that it is of."""
    return f"commit {facts['commit']}" if facts.get("commit") else "commit not recorded"
