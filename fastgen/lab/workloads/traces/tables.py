"""Traces that are CSV files with times and lengths: BurstGPT's and Azure's.

BurstGPT (Wang et al., 2024; HPMLL/BurstGPT on GitHub) has ``Timestamp`` in seconds, ``Request tokens`` and
``Response tokens``, beside ``Model``, ``Total tokens`` and ``Log Type``, and in later releases ``Session ID`` and
``Elapsed time``. An answer of 0 tokens is a request that failed.

Azure (Patel et al., ISCA 2024, and Stojkovic et al., HPCA 2025; Azure/AzurePublicDataset on GitHub) has ``TIMESTAMP``
such as ``2023-11-16 18:15:46.6805900`` or ``2024-05-10 00:00:00.009930+00:00``, ``ContextTokens`` and
``GeneratedTokens``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from fastgen.lab.workloads.traces.rows import TraceFile, TraceRow

# Date and time to the second, parts of a second, and a zone.
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")


def burstgpt_rows(file: TraceFile) -> Iterator[TraceRow]:
    """Yields the rows of a BurstGPT trace. Raises ``TraceError`` for a line that is no such row."""
    for row in file.records("Timestamp", "Request tokens", "Response tokens"):
        yield TraceRow(
            at_s=file.number_of(row["Timestamp"], "Timestamp"),
            num_prompt_tokens=file.count(row["Request tokens"], "Request tokens"),
            num_new_tokens=file.count(row["Response tokens"], "Response tokens"),
        )


def azure_rows(file: TraceFile) -> Iterator[TraceRow]:
    """Yields the rows of an Azure trace. Raises ``TraceError`` for a line that is no such row."""
    for row in file.records("TIMESTAMP", "ContextTokens", "GeneratedTokens"):
        yield TraceRow(
            at_s=_seconds(file, row["TIMESTAMP"]),
            num_prompt_tokens=file.count(row["ContextTokens"], "ContextTokens"),
            num_new_tokens=file.count(row["GeneratedTokens"], "GeneratedTokens"),
        )


def _seconds(file: TraceFile, text: str) -> float:
    """Returns a time of Azure's, in seconds. Its parts of a second have up to seven digits."""
    found = _AZURE_TIME.fullmatch(text.strip())
    if found is None:
        file.fail(f"TIMESTAMP: expected a time such as 2023-11-16 18:15:46.6805900, not {text!r}")
    moment, fraction, zone = found.groups()
    try:
        at = datetime.fromisoformat(moment + (zone or "+00:00").replace("Z", "+00:00"))
    except ValueError as error:
        file.fail(f"TIMESTAMP: {text!r}: {error}")
    return (at - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds() + float(fraction or 0)
