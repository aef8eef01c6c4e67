"""The report of a verification, for people and for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from fastgen.models.spec import NodeRef


@dataclass(frozen=True)
class Cause:
    """A single change of the recipe with which it agrees with the reference; the change was tested.

    ``complete`` means that with the change everything in the failing configuration agrees, not only this node.
    ``unread`` names the keys of the configuration that are not accounted for, if nothing else is wrong.
    """

    node: NodeRef
    change: str
    complete: bool
    unread: str = ""

    def __str__(self) -> str:
        left = f"what remains is that {self.unread}" if self.unread else "a later node still disagrees"
        rest = "" if self.complete else f" (this node then agrees; {left})"
        return f"{self.node}: {self.change}{rest}"


@dataclass(frozen=True)
class Finding:
    """One disagreement. ``node`` is the first recipe node that disagrees; ``None`` if no node is the cause.

    ``difference`` is the largest deviation, in units of the reference's root mean square (absolute for
    log-probabilities). ``config`` is the index of the drawn configuration.
    """

    check: str
    message: str
    node: NodeRef | None
    config: int
    difference: float | None = None
    cause: Cause | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class CheckResult:
    """The count of comparisons of one kind, how many of them failed, and the largest difference."""

    name: str
    num_compared: int = 0
    num_failed: int = 0
    largest: float = 0.0


@dataclass
class Report:
    """The outcome of :func:`fastgen.verify.verify`."""

    recipe: str
    file: str
    architectures: list[str]
    seed: int
    checks: dict[str, CheckResult] = field(default_factory=dict)
    configs: list[dict[str, Any]] = field(default_factory=list)
    # By key of the checkpoint's configuration: its number, and the smaller one that was run.
    shrunk: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    finding: Finding | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.finding is None

    def count(self, check: str, num_compared: int = 1, difference: float = 0.0) -> None:
        result = self.checks.setdefault(check, CheckResult(check))
        result.num_compared += num_compared
        result.largest = max(result.largest, difference)

    def fail(self, finding: Finding) -> None:
        self.checks.setdefault(finding.check, CheckResult(finding.check)).num_failed += 1
        self.finding = finding

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}
