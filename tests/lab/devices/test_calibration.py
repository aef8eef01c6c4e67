"""Calibrations: a simulated device is measured as it is, a real one within its noise, and files say what is wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest

import fastgen
from fastgen.errors import InvalidArgumentError, RecordingError
from fastgen.lab.devices.calibration import calibrate, calibration_of, read_calibration, write_calibration
from fastgen.lab.devices.designed_steps import DesignedSteps
from fastgen.runtime.flight.step_times import measured_steps, work_of
from fastgen.runtime.flight.why import why
from fastgen.runtime.flight.why_text import as_text
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.runtime.scheduling.schedule import Schedule
from fastgen.runtime.simulated import Arrival, SimulatedServer
from fastgen.runtime.step.forward import TapedForward
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.fit import residuals
from fastgen.runtime.step_cost.sight import Sight
from fastgen.runtime.step_cost.work import StepWork

DEVICE = StepCost(
    tokens=((1, 0.010), (32, 0.011), (128, 0.020), (512, 0.060)),
    row_s=2e-5,
    chunk_s=3e-4,
    context_s=4e-7,
    pair_s=2e-9,
    noise=0.05,
)


def server(cost: StepCost = DEVICE, **sizes: int) -> SimulatedServer:
    return SimulatedServer(cost, **{"token_budget": 512, "max_num_seqs": 32, "num_blocks": 1000} | sizes)


def traffic() -> list[Arrival]:
    return [
        Arrival(0.3 * number, [number] * (1 + 37 * number % 900), SamplingParams(max_new_tokens=1 + 13 * number % 90))
        for number in range(100)
    ]


def test_steps_of_a_model_with_windows_are_counted_by_them(tmp_path: Path) -> None:
    device = replace(DEVICE, context_s=4e-6, sights=(Sight(64, 1.0, 1.0),))
    found = calibrate(server(device).engine, "device", seconds=60, sights=device.sights)
    assert found.cost.sights == device.sights
    assert found.arrival_s == 0.0, "the clock of a simulated device stands still meanwhile"
    assert found.cost.context_s == pytest.approx(4e-6, rel=0.1)
    write_calibration(found, tmp_path / "cost.json")
    assert read_calibration(tmp_path / "cost.json") == found


@pytest.mark.parametrize(("windows", "sights"), [((None,), ()), ((64,), (Sight(64, 1.0, 1.0),)), ((64, None), ())])
def test_a_recording_says_the_window_that_all_layers_have(
    windows: tuple[int | None, ...], sights: tuple[Sight, ...]
) -> None:
    recorded = SimulatedServer(DEVICE, token_budget=512, max_num_seqs=32, num_blocks=2000, windows=windows)
    recorded.serve(traffic())
    assert calibration_of(recorded.engine.recorder.recording("device")).cost.sights == sights


@pytest.mark.parametrize("sizes", [(), captured_sizes(512)], ids=["unpadded", "padded"])
def test_a_minute_of_designed_steps_finds_the_device(sizes: tuple[int, ...]) -> None:
    device = StepCost(
        tokens=DEVICE.tokens, row_s=2e-5, chunk_s=3e-4, context_s=4e-7, pair_s=2e-9, sizes=sizes, noise=0.05
    )
    found = calibrate(server(device).engine, "device", seconds=60)
    assert found.cost.sizes == sizes
    assert set(found.residuals) == {"decodes", "mixed", "prompts"}
    assert all(each.median < 0.06 for each in found.residuals.values())
    held_out = server(replace(device, noise=0.0))
    held_out.serve(traffic())
    steps = [step for _, step in measured_steps(held_out.engine.recorder.recording("held out"))]
    for kind, each in residuals(found.cost, steps).items():
        assert abs(each.bias) < 0.05, kind


@pytest.mark.parametrize(("step_s", "num_steps"), [(1e-5, 64), (1e-3, 20), (0.1, 12)])
def test_batches_of_decodes_are_longer_where_steps_are_short(step_s: float, num_steps: int) -> None:
    engine = server(StepCost.linear(step_s, 0.0)).engine
    DesignedSteps(engine).run(2000 * step_s)
    submitted = [each.max_new_tokens for each in engine.recorder.recording("device").arrivals.values()]
    batches = [count for count, equal in groupby(submitted) if len(list(equal)) > 4 and count >= 12]
    assert set(batches) == {12, num_steps}, "the first batch has the fewest"


def test_no_step_is_recorded_as_a_tape_while_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fastgen.load("tiny-llama", max_num_seqs=4, token_budget=128, num_threads=1)
    engine = llm.release_engine()
    steps = DesignedSteps(engine, seed=3)
    steps.warm_up()
    recorded: list[int] = []
    monkeypatch.setattr(TapedForward, "_record", lambda forward, num_tokens: recorded.append(num_tokens))
    for num_tokens in range(1, 65):
        engine.submit(range(num_tokens), SamplingParams(max_new_tokens=1))
        engine.step()
    assert not engine.has_work
    assert recorded == []


def test_the_engine_has_no_requests_afterwards_and_records_as_before() -> None:
    engine = server().engine
    bounds = engine.recorder.max_steps, engine.recorder.max_bytes
    calibrate(engine, "device", seconds=5)
    assert not engine.has_work
    assert (engine.recorder.max_steps, engine.recorder.max_bytes) == bounds


def test_a_recorded_flight_gives_the_cost_too() -> None:
    flown = server()
    flown.serve(traffic())
    recording = flown.engine.recorder.recording("flight")
    found = calibration_of(recording)
    assert found.num_steps == len(recording.steps)
    assert all(each.median < 0.06 for each in found.residuals.values())
    with pytest.raises(InvalidArgumentError, match="0 steps are too few"):
        calibration_of(recording, from_s=1e9)


def test_the_work_of_a_recorded_step_is_what_the_device_was_given() -> None:
    device, works = server(), []
    runner = device.engine.runner
    work = runner._work  # type: ignore[attr-defined]

    def note(schedule: Schedule) -> StepWork:
        works.append(work(schedule))
        return works[-1]

    runner._work = note  # type: ignore[attr-defined]
    device.serve(traffic())
    steps = device.engine.recorder.recording("flight").steps
    assert [work_of(step, before) for before, step in pairwise((None, *steps)) if step is not None] == works
    assert {each.num_built for each in works} == {0, 1}


def test_why_says_what_was_expected_beside_what_steps_took() -> None:
    device = server(StepCost.linear(0.01, 1e-4))
    device.serve(traffic())
    recording = device.engine.recorder.recording("flight")
    facts = why(recording, "5", StepCost.linear(0.02, 2e-4))
    assert facts.expected_s == pytest.approx(2 * facts.steps_s)
    assert facts.worst_gap is not None
    assert facts.worst_gap.expected_s == pytest.approx(2 * facts.worst_gap.step_s)
    own = why(recording, "5")
    assert own.expected_s == pytest.approx(own.steps_s, rel=0.02), "by default the recording itself says it"
    assert "are expected of such steps." in as_text(own)


def test_files_that_are_no_calibration_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot be read"):
        read_calibration(tmp_path / "none.json")
    damaged = tmp_path / "damaged.json"
    found = calibrate(server().engine, "device", seconds=5)
    write_calibration(found, damaged)
    assert read_calibration(damaged) == found
    damaged.write_text(damaged.read_text().replace('"num_steps"', '"num_stops"'))
    with pytest.raises(RecordingError, match="num_steps: Field required"):
        read_calibration(damaged)
    with pytest.raises(RecordingError, match="cannot be written"):
        write_calibration(found, tmp_path / "no" / "such")
