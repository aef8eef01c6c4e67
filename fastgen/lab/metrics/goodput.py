"""Goodput: which requests were answered well enough, by limits or by the FastGen paper's rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from fastgen.errors import InvalidArgumentError
from fastgen.lab.records import RequestRecord
from fastgen.runtime.goodput import is_first_token_in_time, longest_average_gap_s

# The names of limits in commands, as ``vllm bench serve --goodput`` has them, and the fields of :class:`SLO`.
_FIELDS = {
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "itl": "itl_ms",
    "e2el": "e2el_ms",
    "paper": "paper_tokens_per_s",
}


@dataclass(frozen=True, kw_only=True)
class SLO:
    """Limits that an answer must keep to be good. A limit of ``None`` is not looked at.

    A failed request is never good. An answer of one token keeps every limit on later tokens.
    """

    # Most milliseconds to the first token, for each later token on average, and to the end.
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None
    # Most milliseconds of any gap between two tokens. ``vllm bench`` has no such limit.
    itl_ms: float | None = None
    # Tokens per second by the paper's rule (:mod:`fastgen.runtime.goodput`).
    paper_tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        limits = self.as_json()
        if not limits:
            raise InvalidArgumentError("an SLO needs at least one limit")
        for name, value in limits.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise InvalidArgumentError(f"{name}={value!r}: expected a number above 0")

    def is_good(self, record: RequestRecord) -> bool:
        """Returns whether the answer kept every limit."""
        return record.error is None and not self.broken(record)

    def broken(self, record: RequestRecord) -> list[str]:
        """Returns the limits that an answer broke, by the names of the fields."""
        if record.ttft_s is None:
            return list(self.as_json())
        slowest_gap_s = max(record.gaps_s, default=0.0)
        found = [
            name
            for name, value_s in (
                ("ttft_ms", record.ttft_s),
                ("tpot_ms", record.tpot_s or 0.0),
                ("itl_ms", slowest_gap_s),
                ("e2el_ms", record.e2el_s),
            )
            if (limit_ms := getattr(self, name)) is not None and value_s > limit_ms / 1e3
        ]
        if self.paper_tokens_per_s is not None and not keeps_paper_rule(record, self.paper_tokens_per_s):
            found.append("paper_tokens_per_s")
        return found

    def as_json(self) -> dict[str, Any]:
        """Returns the limits that are set, by the names of the fields."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


def keeps_paper_rule(record: RequestRecord, tokens_per_s: float) -> bool:
    """Returns whether an answer is good by the paper's rule at a rate: its first token within ``prompt / 512`` seconds,
    and every value of the moving average of its later gaps below ``1 / tokens_per_s``.
    """
    return (
        record.error is None
        and record.ttft_s is not None
        and is_first_token_in_time(record.num_prompt_tokens, record.ttft_s)
        and longest_average_gap_s(record.gaps_s) < 1 / tokens_per_s
    )


def parse_slo(words: Sequence[str]) -> SLO:
    """Returns the limits of ``words`` such as ``ttft:200``, ``tpot:50`` (milliseconds) or ``paper:4`` (tokens/s).

    :raises InvalidArgumentError: for an unknown limit, one that is given twice, or no number above 0.
    """
    limits: dict[str, float] = {}
    for word in words:
        name, colon, value = word.partition(":")
        if not colon or name not in _FIELDS:
            raise InvalidArgumentError(f"SLO {word!r}: expected LIMIT:NUMBER, with a limit of {', '.join(_FIELDS)}")
        if _FIELDS[name] in limits:
            raise InvalidArgumentError(f"SLO {word!r}: {name} is given twice")
        try:
            limits[_FIELDS[name]] = float(value)
        except ValueError:
            raise InvalidArgumentError(f"SLO {word!r}: {value!r} is not a number") from None
    return SLO(**limits)
