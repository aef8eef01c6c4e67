"""Sums of the metrics of several engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fastgen.runtime.metrics import Histogram, Metrics


def total(one: Metrics, other: Metrics) -> Metrics:
    """Returns the sums of both."""
    return Metrics(**{field.name: _add(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)})


def counters(metrics: Metrics) -> Metrics:
    """Returns the counters of ``metrics``, those of an engine that has ended; its gauges are zero."""
    gauges = [field.name for field in fields(metrics) if not field.name.endswith(("_total", "_seconds"))]
    return Metrics(**{field.name: getattr(metrics, field.name) for field in fields(metrics)} | dict.fromkeys(gauges, 0))


def _add(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        shared = {key: _add(one[key], other[key]) for key in one if key in other}
        return {**one, **other, **shared}
    if isinstance(one, Histogram):
        assert one.bounds == other.bounds
        counts = tuple(map(sum, zip(one.counts, other.counts, strict=True)))
        return Histogram(bounds=one.bounds, counts=counts, sum=one.sum + other.sum)
    return one + other
