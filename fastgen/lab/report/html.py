"""The report as one HTML file: pictures are inside it, it needs no network and no JavaScript."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from fastgen.errors import RecordingError
from fastgen.lab.report.drawing import png
from fastgen.lab.report.pictures import Picture, pictures
from fastgen.lab.report.results import Collection, Result
from fastgen.lab.report.series import swept
from fastgen.lab.report.table import facts_lines, headings, rows, with_interval
from fastgen.version import __version__


def write_report(
    collection: Collection, path: str | Path, *, title: str = "fastgen bench", pngs: bool = True
) -> list[Path]:
    """Writes the report to ``path`` and, with ``pngs``, each picture beside it as ``NAME.png``. Returns all files.

    :raises InvalidArgumentError: if matplotlib is not installed.
    :raises RecordingError: if a file cannot be written.
    """
    path = Path(path)
    drawn = [(picture, png(picture.figure)) for picture in pictures(collection)]
    contents = {path: _page(collection, drawn, title).encode()}
    if pngs:
        contents |= {path.with_name(f"{picture.name}.png"): data for picture, data in drawn}
    for file, data in contents.items():
        try:
            file.write_bytes(data)
        except OSError as error:
            raise RecordingError(f"the report cannot be written: {error.strerror}", file=str(file)) from error
    return list(contents)


def _page(collection: Collection, drawn: Sequence[tuple[Picture, bytes]], title: str) -> str:
    template = (files(__package__) / "templates" / "report.html.j2").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    axis = swept(collection.results)
    return environment.from_string(template).render(
        title=title,
        version=__version__,
        load=axis[1] if axis else "load",
        headings=headings(),
        with_interval=with_interval,
        rows=rows(collection.results),
        pictures=[(picture, base64.b64encode(data).decode()) for picture, data in drawn],
        machines=_machines(collection.results),
        runs=[(each, list(facts_lines(_facts(each)))) for each in collection.results],
        recordings=collection.recordings,
        unread=collection.unread,
    )


def _facts(result: Result) -> dict[str, Any]:
    summary, duration = result.summary, result.summary["duration"].value
    lag = {name: f"{1e3 * value:.1f} ms" for name, value in summary.about.get("lag_s", {}).items()}
    seconds = {} if duration is None else {"duration": f"{duration:.1f} s"}
    rest = {name: value for name, value in summary.about.items() if name not in ("lag_s", "machine")}
    return {"source": summary.source} | seconds | rest | ({"lag": lag} if lag else {})


def _machines(results: Sequence[Result]) -> list[list[tuple[str, str]]]:
    """Returns the facts of each machine that measured something."""
    found: list[list[tuple[str, str]]] = []
    for each in results:
        facts = list(facts_lines(each.summary.about.get("machine", {})))
        if facts and facts not in found:
            found.append(facts)
    return found
