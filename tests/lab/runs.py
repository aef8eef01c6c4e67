"""Runs with drawn records, for tests of figures."""

from __future__ import annotations

import random

from fastgen.lab.records import RequestRecord, Run, RunHeader


def header(*, duration_s: float, num_clients: int | None = None) -> RunHeader:
    return RunHeader(
        target={"engine": "none"},
        workload={"name": "drawn"},
        load={"clients": num_clients},
        machine={},
        began="2026-11-23T12:00:00Z",
        duration_s=duration_s,
    )


def closed_loop(num_requests: int, num_clients: int, *, seed: int = 0, failing: int = 0, ends_late: bool = True) -> Run:
    """Returns a run in which clients send one request after another. Every ``failing``-th request fails. With
    ``ends_late``, an answer ends a little after its last token.
    """
    draw = random.Random(seed)
    free_s = [0.01 * client for client in range(num_clients)]
    records = []
    for number in range(num_requests):
        client = min(range(num_clients), key=free_s.__getitem__)
        sent_s = free_s[client]
        num_prompt_tokens = draw.randint(100, 1000)
        times = [sent_s + draw.uniform(0.2, 1.1) * num_prompt_tokens / 512]
        scale = draw.choice([0.05, 0.15, 0.4])
        for _ in range(draw.randint(0, 60)):
            times.append(times[-1] + draw.expovariate(1 / scale))
        ended_s = times[-1] + (draw.uniform(0, 0.01) if ends_late else 0.0)
        fails = failing > 0 and number % failing == failing - 1
        records.append(
            RequestRecord(
                request=number,
                client=client,
                num_prompt_tokens=num_prompt_tokens,
                num_new_tokens=len(times),
                due_s=sent_s,
                sent_s=sent_s,
                token_times_s=tuple(times[:1] if fails else times),
                ended_s=ended_s,
                error="it broke" if fails else None,
            )
        )
        free_s[client] = ended_s
    return Run(header(duration_s=max(r.ended_s for r in records), num_clients=num_clients), tuple(records))
