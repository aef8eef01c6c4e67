"""The rows of trace files, checked, and the requests made of them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from fastgen.errors import TraceError
from fastgen.lab.workloads.prompts import drawn_ids, generator, same_ids
from fastgen.lab.workloads.request import PlannedRequest

# Tokens that one hash id of a Mooncake trace stands for.
TOKENS_PER_HASH = 512
# Most tokens of a prompt or an answer. More is a mistake in the file, and would fill the memory.
MAX_TOKENS = 10_000_000


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    """One request of a trace, before its tokens are drawn."""

    # When it came, in seconds after any zero; ``None`` if the trace does not say.
    at_s: float | None
    num_prompt_tokens: int
    num_new_tokens: int
    # The prompt, where the trace has it.
    prompt_ids: Sequence[int] | None = None
    # Names of the blocks of :data:`TOKENS_PER_HASH` tokens that the prompt begins with.
    hash_ids: Sequence[int | str] = ()
    session: str | None = None
    # Seconds from the answer before it in its session.
    think_s: float = 0.0
    continues: bool = False


class TraceFile:
    """The lines of a trace file. Its errors name the file and the line."""

    def __init__(self, path: str):
        self.path = path
        # The line that is read now, from 1.
        self.number = 0
        try:
            self.text = Path(path).read_text("utf-8-sig")
        except OSError as error:
            raise TraceError(f"the trace cannot be read: {error.strerror}", file=path) from None
        except UnicodeDecodeError:
            raise TraceError("the trace is not a text in UTF-8", file=path) from None

    @property
    def _lines(self) -> list[str]:
        """Returns the lines. Texts may contain other characters that end a line, such as U+2028."""
        return self.text.split("\n")

    def fail(self, message: str) -> NoReturn:
        """Raises ``TraceError`` for the line that is read now."""
        raise TraceError(message, file=self.path, line=self.number or None)

    def objects(self) -> Iterator[dict[str, Any]]:
        """Yields the objects of a JSON Lines file. Empty lines are passed over."""
        for number, line in enumerate(self._lines, start=1):
            self.number = number
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                self.fail(f"no JSON: {error}")
            if not isinstance(found, dict):
                self.fail("expected a JSON object")
            yield found

    def records(self, *needed: str) -> Iterator[dict[str, str]]:
        """Yields the rows of a CSV file with a header that has the columns ``needed``."""
        reader = csv.reader(self._lines)
        header = [name.strip() for name in next(reader, [])]
        self.number = 1
        if missing := [name for name in needed if name not in header]:
            self.fail(f"the header has no column {missing[0]!r}; it has {', '.join(map(repr, header))}")
        for row in reader:
            self.number = reader.line_num
            if not row:
                continue
            if len(row) != len(header):
                self.fail(f"{len(row)} columns, but the header has {len(header)}")
            yield dict(zip(header, row, strict=True))

    def count(self, value: object, name: str) -> int:
        """Returns a number of tokens."""
        number = self.number_of(value, name)
        if number != int(number) or not 0 <= number <= MAX_TOKENS:
            self.fail(f"{name}: expected an integer from 0 to {MAX_TOKENS}, not {value!r}")
        return int(number)

    def number_of(self, value: object, name: str) -> float:
        """Returns a finite number; CSV files have it as text."""
        try:
            found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        except (OverflowError, ValueError):
            found = math.nan
        if not math.isfinite(found):
            self.fail(f"{name}: expected a number, not {value!r}")
        return found


def cut(rows: Iterable[TraceRow], *, num: int | None, speed: float) -> list[TraceRow]:
    """Returns the first ``num`` rows that can be sent, with times that begin at 0 and pass ``speed`` times as fast.

    Rows come in order of time, those without a time in their order in the file. A row without a token of the prompt or
    of the answer cannot be sent: services log failed requests so. Pauses inside sessions shrink like the times.
    """
    kept = [row for row in rows if row.num_prompt_tokens > 0 and row.num_new_tokens > 0]
    if all(row.at_s is not None or row.session is not None for row in kept):
        kept = _ordered(kept)
    kept = kept[:num]
    begin_s = min((row.at_s for row in kept if row.at_s is not None), default=0.0)
    return [
        replace(
            row,
            at_s=None if row.at_s is None else (row.at_s - begin_s) / speed,
            think_s=row.think_s / speed,
        )
        for row in kept
    ]


def planned(rows: Sequence[TraceRow], *, vocab_size: int, seed: int) -> list[PlannedRequest]:
    """Returns the requests of ``rows``. Tokens that the trace does not have are drawn; equal hash ids have equal ones.

    The tokens of a text are taken modulo ``vocab_size``.
    """
    draw = generator(seed, "trace prompts")
    blocks: dict[int | str, list[int]] = {}

    def prompt(row: TraceRow) -> list[int]:
        if row.prompt_ids is not None:
            return [token % vocab_size for token in row.prompt_ids]
        ids: list[int] = []
        for name in row.hash_ids:
            if name not in blocks:
                blocks[name] = same_ids(seed, name, TOKENS_PER_HASH, vocab_size)
            ids += blocks[name]
        ids = ids[: row.num_prompt_tokens]
        return ids + drawn_ids(draw, row.num_prompt_tokens - len(ids), vocab_size)

    return [
        PlannedRequest(
            prompt_ids=prompt(row),
            num_new_tokens=row.num_new_tokens,
            due_s=row.at_s,
            session=row.session,
            think_s=row.think_s,
            continues=row.continues,
        )
        for row in rows
    ]


def _ordered(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Returns ``rows`` in order of time. A row without a time follows the one before it in its session."""
    times: list[float] = []
    latest: dict[str | None, float] = {}
    for row in rows:
        at_s = latest.get(row.session, 0.0) if row.at_s is None else row.at_s
        latest[row.session] = at_s
        times.append(at_s)
    return [row for _, row in sorted(zip(times, rows, strict=True), key=lambda pair: pair[0])]
