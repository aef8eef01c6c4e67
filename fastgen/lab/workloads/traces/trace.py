"""The workload that replays a trace."""

# Annotations are not postponed: the registry reads the types of the fields.

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

from fastgen.arguments import ABOVE_0, AT_LEAST_1, TRUE_OR_FALSE, Check, Option
from fastgen.lab.workloads.named import checked, stated
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.lab.workloads.traces.mooncake import mooncake_rows
from fastgen.lab.workloads.traces.rows import TraceFile, TraceRow, cut, planned
from fastgen.lab.workloads.traces.sharegpt import sharegpt_rows
from fastgen.lab.workloads.traces.tables import azure_rows, burstgpt_rows

FORMATS = ("mooncake", "sharegpt", "burstgpt", "azure")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests of a trace file: Mooncake (JSON Lines), ShareGPT (JSON), BurstGPT or Azure (CSV).

    Times begin at 0 with the first request. In closed loops they do not count. Requests that the trace logs without a
    token of the prompt or of the answer are left out.
    """

    name: ClassVar[str] = "trace"
    file: Annotated[str, Option("The file.")]
    num_requests: Annotated[
        int | None, Option("Most requests to take, from the first.", check=AT_LEAST_1, name="n", default="all")
    ] = None
    speed: Annotated[float, Option("How many times as fast as in the trace time passes.", check=ABOVE_0)] = 1.0
    turns: Annotated[
        bool, Option("Makes sessions of ShareGPT's conversations, not single requests.", check=TRUE_OR_FALSE)
    ] = False
    format: Annotated[
        str | None,
        Option(
            f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}.",
            default="by the file's beginning",
            check=Check(f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}", lambda value: value in FORMATS),
        ),
    ] = None
    # Returns the tokens of a text; needed for traces that have texts.
    encode: Callable[[str], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        checked(self)

    def requests(self, *, vocab_size: int, seed: int) -> list[PlannedRequest]:
        """Returns the requests. Raises ``TraceError`` for a file or a line that cannot be read."""
        return planned(self._rows, vocab_size=vocab_size, seed=seed)

    def facts(self) -> dict[str, Any]:
        return stated(self)

    @cached_property
    def _rows(self) -> list[TraceRow]:
        file = TraceFile(self.file)
        kind = self.format or _recognized(file)
        rows: Iterable[TraceRow]
        if kind == "mooncake":
            rows = mooncake_rows(file, self.encode)
        elif kind == "sharegpt":
            rows = sharegpt_rows(file, self.encode, turns=self.turns)
        else:
            rows = azure_rows(file) if kind == "azure" else burstgpt_rows(file)
        found = cut(rows, num=self.num_requests, speed=self.speed)
        if not found:
            file.number = 0
            file.fail("the trace has no request that can be sent")
        return found


def _recognized(file: TraceFile) -> str:
    """Returns the format of the file, by how it begins."""
    head = file.text.lstrip()[:1]
    if head == "[":
        return "sharegpt"
    if head == "{":
        return "mooncake"
    columns = file.text.lstrip().partition("\n")[0]
    if "ContextTokens" in columns:
        return "azure"
    if "Request tokens" in columns:
        return "burstgpt"
    file.number = 1
    file.fail(f"this is none of the formats {', '.join(FORMATS)}")
