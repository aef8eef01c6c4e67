"""The choices of tuning that a kernel cache keeps: listed, exported to be shipped, and taken for a GPU elsewhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastgen.compile.build.autotune import DIRECTORY, SHIPPED, Loader, Tuning, shipped

_log = logging.getLogger(__name__)


def tuning_for(device_name: str, loader: Loader) -> Tuning:
    """Returns the tuning for a GPU that need not be here: known choices are taken, and nothing is measured."""
    if device_name not in shipped() and not any(each["device"] == device_name for each in kept(loader.cache.directory)):
        _log.warning("no choices are known for %r, so the defaults are taken", device_name)
    return Tuning(loader, loader.cache.directory, device_name)


def kept(directory: Path) -> list[dict[str, Any]]:
    """Returns what was measured and kept in a kernel cache, the oldest first: ``device``, ``problem``, ``choice``, and
    the ``seconds`` of the choice and of the default.
    """
    found: list[tuple[float, str, dict[str, Any]]] = []
    for file in directory.glob(f"{DIRECTORY}/*.json"):
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            key, choice, seconds = data["key"], data["choice"], data["seconds"]
            of_choice = next(time for each, time in seconds if each == choice)
            row = {"device": key["device"], "problem": key["problem"], "choice": choice}
            row |= {"seconds": of_choice, "default_seconds": seconds[0][1]}
            found.append((file.stat().st_mtime, file.name, row))
        except (OSError, ValueError, RecursionError, KeyError, TypeError, StopIteration):
            _log.debug("%s is damaged, or was removed", file)
    return [row for *_, row in sorted(found, key=lambda each: each[:2])]


def export(directory: Path, file: Path) -> Mapping[str, int]:
    """Writes what a kernel cache keeps into ``file``, in the form of ``tuned_devices.json``. What is there of other
    devices and problems stays. Returns how many choices were written of each device. Raises ``OSError`` and
    ``ValueError``.
    """
    table = json.loads((file if file.exists() else SHIPPED).read_text(encoding="utf-8"))
    counts: dict[str, set[str]] = {}
    for each in kept(directory):
        table["devices"].setdefault(each["device"], {})[each["problem"]] = each["choice"]
        counts.setdefault(each["device"], set()).add(each["problem"])
    file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return {device: len(problems) for device, problems in counts.items()}
