"""Runs and recordings made by hand, for reports of them."""

from __future__ import annotations

import random
from pathlib import Path

from fastgen import SamplingParams
from fastgen.lab.records import RequestRecord, Run, RunHeader, write_run
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.flight.recording_file import write_recording
from fastgen.runtime.scheduling.policies import choose_policy
from fastgen.runtime.simulated import Arrival, SimulatedServer
from fastgen.runtime.step_cost.cost import StepCost


def made_run(policy: str, clients: int, *, gap_s: float, invalid: str | None = None, interrupted: bool = False) -> Run:
    """Returns a closed loop of 40 requests, whose tokens come ``gap_s`` apart."""
    records, free_s = [], [0.0] * clients
    for request in range(40):
        client = min(range(clients), key=lambda each: free_s[each])
        sent_s = free_s[client]
        first_s = sent_s + 0.5 + 0.01 * (request % 7)
        times_s = tuple(first_s + gap_s * (1 + 0.1 * (request % 3)) * token for token in range(20))
        free_s[client] = times_s[-1]
        failed = request == 39
        records.append(
            RequestRecord(
                request=request,
                client=client,
                num_prompt_tokens=1000,
                num_new_tokens=20,
                due_s=sent_s,
                sent_s=sent_s,
                token_times_s=() if failed else times_s,
                ended_s=times_s[-1],
                error="refused" if failed else None,
            )
        )
    header = RunHeader(
        target={"kind": "engine", "engine": {"policy": policy, "policy_parameters": {"budget": len(policy)}}},
        workload={"name": "made", "n": 40},
        load={"loop": "closed", "clients": clients, "warm_ups": clients, "seed": 0},
        machine={"processor": "<b>made</b>", "cores": 2},
        began="2026-11-23T00:00:00+00:00",
        duration_s=max(free_s),
        lag_s={"p50": 0.001, "p90": 0.002, "p99": 0.004},
        invalid=invalid,
        interrupted=interrupted,
    )
    return Run(header, tuple(records))


def made_recording(policy: str) -> Recording:
    """Returns a recording of 20 requests on a simulated device."""
    draw = random.Random(0)
    server = SimulatedServer(
        StepCost.linear(step_s=0.02, token_s=4e-5, context_s=2e-7, pair_s=1e-9),
        token_budget=512,
        max_num_seqs=16,
        num_blocks=500,
        policy=choose_policy(policy, None),
    )
    server.serve(
        Arrival(0.1 * place, [3] * draw.randint(300, 1000), SamplingParams(max_new_tokens=30)) for place in range(20)
    )
    return server.engine.recorder.recording("a/model")


def fill(directory: Path) -> None:
    """Writes two series of three runs, an invalid and an interrupted run, two recordings and a damaged run."""
    for policy, gap_s in (("splitfuse", 0.05), ("orca", 0.08)):
        for clients in (1, 4, 16):
            write_run(
                made_run(policy, clients, gap_s=gap_s * (1 + clients / 10)), directory / f"{policy}_{clients}.jsonl"
            )
        write_recording(made_recording(policy), directory / f"{policy}_flight.jsonl")
    write_run(made_run("orca", 8, gap_s=0.1, invalid="requests were sent up to 2.1 s late"), directory / "late.jsonl")
    write_run(made_run("orca", 2, gap_s=0.1, interrupted=True), directory / "stopped.jsonl")
    (directory / "damaged.jsonl").write_text((directory / "late.jsonl").read_text()[:-40])
    (directory / "notes.jsonl").write_text('{"something": "else"}\n')
