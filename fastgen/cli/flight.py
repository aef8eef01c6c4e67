"""``fastgen why``, ``replay`` and ``timeline``: explain requests from a recording alone."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fastgen.runtime.flight.replay import Difference

RecordingFile = Annotated[Path, typer.Argument(metavar="FILE", help="A recording, from LLM.save_recording.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]


def why(
    request: Annotated[
        list[str],
        typer.Argument(
            metavar="[SERVER] REQUEST",
            help="A request_id of the recording; 3.1 is request 3's completion 1. With SERVER, an address or a name: "
            "the id of an answer, or of the header x-request-id. FASTGEN_API_KEY holds its key.",
        ),
    ],
    recording: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A recording, from LLM.save_recording; needed without SERVER.", show_default=False
        ),
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="From fastgen calibrate: what steps are expected to take; by default what those of the recording do.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of REQUEST went: queue, its own compute, other requests in the batch, preemptions, gaps."""
    from fastgen.runtime.flight.recording_file import read_recording
    from fastgen.runtime.flight.why import why as find_facts
    from fastgen.runtime.flight.why_text import as_text

    if len(request) != (2 if recording is None else 1):
        raise typer.BadParameter("give SERVER and REQUEST, or REQUEST and --recording FILE")
    if recording is None:
        from fastgen.serving.clients.recordings import fetch_recordings

        recordings = fetch_recordings(*request, api_key=os.environ.get("FASTGEN_API_KEY") or None)
    else:
        recordings = [(read_recording(recording), request)]
    expected = None
    if cost is not None:
        from fastgen.lab.devices.calibration import read_calibration

        expected = read_calibration(cost).cost
    for found, sequences in recordings:
        for sequence in sequences:
            facts = find_facts(found, sequence, expected)
            print(json.dumps(asdict(facts)) if as_json else as_text(facts))


def replay(recording: RecordingFile, as_json: AsJson = False) -> None:
    """Run the scheduler again over FILE and compare every decision. Exit status 1 where one differs."""
    from fastgen.runtime.flight.recording_file import read_recording
    from fastgen.runtime.flight.replay import first_difference, num_replayed

    found = read_recording(recording)
    difference = first_difference(found)
    num_steps = num_replayed(found)
    if as_json:
        facts = {"steps": num_steps, "equal": difference is None}
        print(json.dumps(facts | ({} if difference is None else {"difference": asdict(difference)})))
    elif difference is None:
        left_out = (
            f", from the first snapshot on ({len(found.steps):,} were recorded)" if found.header.first_step else ""
        )
        print(f"{num_steps:,} steps of {len(found.arrivals):,} requests{left_out}: every decision is the same")
    else:
        print("\n".join(_difference_lines(difference)))
    if difference is not None:
        sys.exit(1)


def timeline(
    recording: RecordingFile,
    out: Annotated[Path, typer.Option(metavar="PICTURE", help="A .png or .svg file to write.", show_default=False)],
) -> None:
    """Draw FILE: tokens and time of the steps, running and waiting requests, preemptions, and the blocks they hold."""
    from fastgen.runtime.flight.recording_file import read_recording
    from fastgen.runtime.flight.timeline_picture import draw

    draw(read_recording(recording), out)


def _difference_lines(difference: Difference) -> list[str]:
    number = difference.recorded.step
    if difference.replayed is None:
        return [f"step {number:,} was recorded, but now nothing is left to schedule"]
    lines = [f"step {number:,} is the first that differs"]
    for name in difference.fields:
        recorded, replayed = getattr(difference.recorded, name), getattr(difference.replayed, name)
        lines += [f"  {name}", f"    recorded {json.dumps(recorded)}", f"    now      {json.dumps(replayed)}"]
    return lines
