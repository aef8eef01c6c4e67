"""A run in virtual time: clients, a router, and replicas of a server on a simulated device.

The engine is the product's own, with its scheduler, block pool and recorder; the device is a cost and a clock. So the
decisions are those that the real engine makes where its steps take as long. Everything follows from the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastgen.errors import InvalidArgumentError
from fastgen.lab.records import RequestRecord, Run, RunHeader
from fastgen.lab.simulation.clients import Clients, Send
from fastgen.lab.simulation.replica import Replica
from fastgen.lab.simulation.router import make_router
from fastgen.lab.simulation.settings import ServerSettings
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.lab.workloads.sessions import Conversations
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.version import __version__

# Virtual time has no date.
_BEGAN = "1970-01-01T00:00:00+00:00"


def simulate(
    requests: Sequence[PlannedRequest],
    settings: ServerSettings,
    cost: StepCost,
    *,
    num_clients: int | None = None,
    stagger_s: float = 0.0,
    num_replicas: int = 1,
    router: str = "least_tokens",
    seed: int = 0,
    workload: Mapping[str, Any] | None = None,
) -> Run:
    """Returns what ``requests`` would see: in an open loop, where each has its ``due_s``, or with ``num_clients`` in a
    closed one, whose clients begin U(0, ``num_clients``) times ``stagger_s`` late.

    Each of ``num_replicas`` servers has these ``settings`` and this ``cost`` of a step. ``router`` is ``"round_robin"``
    or ``"least_tokens"``. ``workload`` are the facts of the workload for the header.

    :raises InvalidArgumentError: for arguments that cannot work. A request that the server would refuse is no error;
        its record says so.
    """
    return Simulation(
        requests,
        settings,
        cost,
        num_clients=num_clients,
        stagger_s=stagger_s,
        num_replicas=num_replicas,
        router=router,
        seed=seed,
        workload=workload,
    ).run()


class Simulation:
    """One run, as :func:`simulate` makes it. With ``records_flight``, :meth:`recordings` has every step afterwards."""

    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        settings: ServerSettings,
        cost: StepCost,
        *,
        num_clients: int | None = None,
        stagger_s: float = 0.0,
        num_replicas: int = 1,
        router: str = "least_tokens",
        seed: int = 0,
        workload: Mapping[str, Any] | None = None,
        records_flight: bool = False,
    ):
        if num_replicas < 1:
            raise InvalidArgumentError(f"num_replicas={num_replicas}: expected at least one")
        self._requests, self._settings, self._cost = requests, settings, cost
        self._clients = Clients(requests, num_clients, stagger_s=stagger_s, seed=seed)
        self._route = make_router(router)
        self.replicas = [
            Replica(settings, cost, self._end, seed=seed + number, records_flight=records_flight)
            for number in range(num_replicas)
        ]
        self._facts = {"replicas": num_replicas, "router": router, "seed": seed}
        self._load = (
            {"loop": "open"}
            if num_clients is None
            else {"loop": "closed", "clients": num_clients, "stagger_s": stagger_s, "seed": seed}
        )
        self._workload = dict(workload or {})
        # What was sent and is not answered yet, by its answer.
        self._sent: dict[Generation, Send] = {}
        self._records: dict[int, RequestRecord] = {}
        self._conversations = Conversations()

    def run(self) -> Run:
        """Returns the records of all requests. Can be called once."""
        clients, replicas, delay_s = self._clients, self.replicas, self._settings.request_delay_s
        while True:
            replica = min(replicas, key=_next_step_s)
            step_s, arrival_s = replica.next_step_s, clients.next_s + delay_s
            if arrival_s <= step_s:
                if arrival_s == float("inf"):
                    break
                self._submit(clients.send(), arrival_s)
            else:
                replica.step()
        return Run(self._header(), tuple(self._records[number] for number in range(len(self._requests))))

    def recordings(self, model: str) -> list[Recording]:
        """Returns the flight recording of each replica; ``model`` is the model's name in it."""
        return [replica.recording(model) for replica in self.replicas]

    def _submit(self, sent: Send, arrival_s: float) -> None:
        request = self._requests[sent.request]
        prompt_ids = self._conversations.prompt(request)
        try:
            generation = self._route(self.replicas).submit(prompt_ids, request.num_new_tokens, arrival_s)
        except InvalidArgumentError as error:
            ended_s = arrival_s + self._settings.token_delay_s
            self._record(sent, len(prompt_ids), token_times_s=(), ended_s=ended_s, error=str(error))
            return
        self._sent[generation] = sent

    def _end(self, generation: Generation) -> None:
        (completion,) = generation.completions
        assert completion.error is None, completion.error
        delay_s = self._settings.token_delay_s
        times_s = tuple([time_s + delay_s for time_s in completion.token_times_s])
        sent, sequence = self._sent.pop(generation), completion.sequence
        num_prompt = sequence.num_prompt_tokens
        request = self._requests[sent.request]
        if request.session is not None:
            self._conversations.answered(request, sequence.token_ids[:num_prompt], sequence.token_ids[num_prompt:])
        self._record(
            sent,
            num_prompt,
            token_times_s=times_s,
            ended_s=times_s[-1],
            num_cached_tokens=sequence.num_cached_tokens,
            finish_reason=completion.finish_reason,
        )

    def _record(
        self, sent: Send, num_prompt_tokens: int, *, token_times_s: tuple[float, ...], ended_s: float, **facts: Any
    ) -> None:
        request = self._requests[sent.request]
        self._records[sent.request] = RequestRecord(
            request=sent.request,
            client=sent.client,
            session=request.session,
            num_prompt_tokens=num_prompt_tokens,
            num_new_tokens=request.num_new_tokens,
            due_s=sent.at_s,
            sent_s=sent.at_s,
            token_times_s=token_times_s,
            ended_s=ended_s,
            **facts,
        )
        self._clients.ended(sent, ended_s)

    def _header(self) -> RunHeader:
        return RunHeader(
            target={"simulated": self._settings.facts(), "cost": asdict(self._cost), **self._facts},
            workload=self._workload,
            load=self._load,
            machine={"fastgen": __version__},
            began=_BEGAN,
            duration_s=max((record.ended_s for record in self._records.values()), default=0.0),
        )


def _next_step_s(replica: Replica) -> float:
    return replica.next_step_s
