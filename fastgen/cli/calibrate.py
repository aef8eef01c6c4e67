"""``fastgen calibrate``: measures what steps cost on this machine, for the simulated device."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fastgen.cli import options


@options.with_flags(load=options.LOAD_ARGUMENTS)
def calibrate(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=f"{options.MODEL_HELP} Not with --recording.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to measure.")] = 60.0,
    recording: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the steps of this recording, from LLM.save_recording, instead."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the cost of a step to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the steps that are measured.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    *,
    load: options.Given,
) -> None:
    """Measure what the steps of MODEL cost on this machine, for simulations of it."""
    from fastgen.lab.devices.calibration import calibrate as measure
    from fastgen.lab.devices.calibration import calibration_of, write_calibration

    if (model is None) == (recording is None):
        options.usage_error("give MODEL, or --recording FILE")
    if recording is not None:
        if load:
            options.usage_error("the engine of a recording is what it was: leave out the arguments of loading")
        from fastgen.runtime.flight.recording_file import read_recording

        found = calibration_of(read_recording(recording))
    else:
        import fastgen
        from fastgen.lab.devices.sights import sights_of

        assert model is not None
        llm = fastgen.load(model, **load)
        found = measure(llm.release_engine(), model, seconds=seconds, seed=seed, sights=sights_of(llm.spec))
    print(json.dumps(asdict(found)) if as_json else found.as_text())  # first: a file may not be written
    if output is not None:
        write_calibration(found, output)
