"""Measures how much faster than real time the simulator is.

``python -m benchmarks.lab.simulation_speed [--output FILE]`` simulates a device of the order of four A100-80GB with
Llama-2-70B: 35 GB of weights on each are read in 25 ms, and a prompt token takes 0.2 ms. The loads are the FastGen
paper's (2,600 prompt tokens, 60 or 128 new ones), and one of long answers, which has the most steps for its time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.cpu.results import now
from benchmarks.new_file import new_file
from fastgen.lab.machine import machine_facts
from fastgen.lab.simulation import ServerSettings, Simulation
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.runtime.step_cost.cost import StepCost

LLAMA_2_70B = StepCost(
    tokens=((1, 0.025), (64, 0.026), (128, 0.030), (512, 0.105), (2048, 0.41)), context_s=5e-8, pair_s=2e-9
)
SETTINGS = ServerSettings(num_blocks=27_000, token_budget=512, max_num_seqs=256, prefix_caching=False)
LOADS = {"2600 + 60": (2600, 60, 16), "2600 + 128": (2600, 128, 16), "200 + 500": (200, 500, 32)}


def requests(num_prompt: int, num_new: int, num: int) -> list[PlannedRequest]:
    draw = random.Random(0)
    return [
        PlannedRequest(
            prompt_ids=[1] * max(1, round(draw.gauss(num_prompt, 0.3 * num_prompt))),
            num_new_tokens=max(1, round(draw.gauss(num_new, 0.3 * num_new))),
        )
        for _ in range(num)
    ]


def measure(name: str, records_flight: bool) -> dict[str, Any]:
    num_prompt, num_new, num_clients = LOADS[name]
    planned = requests(num_prompt, num_new, 256)
    simulation = Simulation(
        planned, SETTINGS, LLAMA_2_70B, num_clients=num_clients, stagger_s=0.01, records_flight=records_flight
    )
    begin = time.process_time()
    run = simulation.run()
    took_s = time.process_time() - begin
    return {
        "simulated_s": round(run.header.duration_s, 1),
        "took_s": round(took_s, 3),
        "times_real_time": round(run.header.duration_s / took_s),
        "clients": num_clients,
        "records_flight": records_flight,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=new_file)
    output: Path | None = parser.parse_args().output
    about = {"made": now(), "machine": machine_facts()}
    results = {}
    for name in LOADS:
        for records_flight in (False, True):
            found = max((measure(name, records_flight) for _ in range(3)), key=lambda one: one["times_real_time"])
            results[f"{name}{', recorded' if records_flight else ''}"] = found
            print(f"{name:10} {'recorded' if records_flight else '':9} {found['times_real_time']:6,} × real time")
    if output is not None:
        output.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
