"""A run in virtual time: clients, a router, and replicas of a server on a simulated device.

The engine is the product's own, with its scheduler, block pool and recorder; the device is a cost and a clock. So the
decisions are those that the real engine makes where its steps take as long. Everything follows from the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from fastgen.errors import InvalidArgumentError
from fastgen.lab.records import RequestRecord, Run, RunHeader
from fastgen.lab.simulation.clients import Clients, Send
from fastgen.lab.simulation.replica import Replica
from fastgen.lab.simulation.settings import ServerSettings
from fastgen.lab.workloads.request import PlannedRequest
from fastgen.lab.workloads.sessions import Conversations
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.flight.recording import Recording
from fastgen.runtime.routing import RoutedRequest, Router, block_hashes, make_router
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
    router: str | Router = "least_tokens",
    seed: int = 0,
    workload: Mapping[str, Any] | None = None,
) -> Run:
    """Returns a simulated run of ``requests``. It is an open loop, in which each request is sent at its ``due_s``, or
    with ``num_clients`` a closed one, in which each client begins U(0, ``num_clients``) times ``stagger_s`` late.

    Each of ``num_replicas`` servers has these ``settings`` and this ``cost`` of a step. ``router`` chooses among them:
    a name of :data:`~fastgen.runtime.routing.registry.ROUTERS`, or a router without any requests yet. Choosing takes
    no time. ``workload`` holds the facts of the workload for the header.

    :raises InvalidArgumentError: for arguments that cannot work. A request that the server would refuse raises nothing;
        its record contains the refusal.
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


class _Routed(NamedTuple):
    """A request that was sent to a replica."""

    send: Send
    request: RoutedRequest
    replica: str


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
        router: str | Router = "least_tokens",
        seed: int = 0,
        workload: Mapping[str, Any] | None = None,
        records_flight: bool = False,
    ):
        if num_replicas < 1:
            raise InvalidArgumentError(f"num_replicas={num_replicas}: expected at least one")
        self._requests, self._settings, self._cost = requests, settings, cost
        self._clients = Clients(requests, num_clients, stagger_s=stagger_s, seed=seed)
        self._router = router if not isinstance(router, str) else self._made_router(router, seed)
        self._replica_ids = [str(number) for number in range(num_replicas)]
        self.replicas = [
            Replica(settings, cost, self._end, seed=seed + number, records_flight=records_flight)
            for number in range(num_replicas)
        ]
        name = router if isinstance(router, str) else type(router).__name__
        self._facts = {"replicas": num_replicas, "router": name, "seed": seed}
        self._load = (
            {"loop": "open"}
            if num_clients is None
            else {"loop": "closed", "clients": num_clients, "stagger_s": stagger_s, "seed": seed}
        )
        self._workload = dict(workload or {})
        # What was sent and is not answered yet, by its answer.
        self._sent: dict[Generation, _Routed] = {}
        self._records: dict[int, RequestRecord] = {}
        self._conversations = Conversations()

    def run(self) -> Run:
        """Returns the records of all requests. Can be called once."""
        clients, replicas, delay_s = self._clients, self.replicas, self._settings.request_delay_s
        steps_s = [replica.next_step_s for replica in replicas]
        while True:
            step_s, arrival_s = min(steps_s), clients.next_s + delay_s
            number = steps_s.index(step_s)
            if arrival_s <= step_s:
                if arrival_s == float("inf"):
                    break
                number = self._submit(clients.send(), arrival_s)
            else:
                replicas[number].step()
            steps_s[number] = replicas[number].next_step_s
        return Run(self._header(), tuple(self._records[number] for number in range(len(self._requests))))

    def recordings(self, model: str) -> list[Recording]:
        """Returns the flight recording of each replica; ``model`` is the model's name in it."""
        return [replica.recording(model) for replica in self.replicas]

    def _submit(self, sent: Send, arrival_s: float) -> int:
        """Submits a request and returns the number of its replica."""
        request = self._requests[sent.request]
        prompt_ids = self._conversations.prompt(request)
        routed = self._routed(request, prompt_ids)
        replica = self._router.rank(routed, self._replica_ids)[0]
        try:
            generation = self.replicas[int(replica)].submit(prompt_ids, request.num_new_tokens, arrival_s)
        except InvalidArgumentError as error:
            ended_s = arrival_s + self._settings.token_delay_s
            self._conversations.answered(request, prompt_ids, ())  # as a load generator says of an empty answer
            self._record(sent, len(prompt_ids), token_times_s=(), ended_s=ended_s, error=str(error))
        else:
            self._router.sent(routed, replica)
            self._sent[generation] = _Routed(sent, routed, replica)
        return int(replica)

    def _made_router(self, name: str, seed: int) -> Router:
        settings = self._settings
        return make_router(name, block_size=settings.block_size, num_blocks=settings.num_blocks, seed=seed)

    def _routed(self, request: PlannedRequest, prompt_ids: list[int]) -> RoutedRequest:
        """Returns ``request`` for the router. It has hashes only if replicas can differ in what they hold."""
        differ = self._settings.prefix_caching and len(self.replicas) > 1
        hashes = block_hashes(prompt_ids, self._settings.block_size) if differ else ()
        return RoutedRequest(len(prompt_ids), request.num_new_tokens, hashes, request.session)

    def _end(self, generation: Generation) -> None:
        (completion,) = generation.completions
        assert completion.error is None, completion.error
        delay_s, times_s = self._settings.token_delay_s, tuple(completion.token_times_s)
        if delay_s:
            times_s = tuple([time_s + delay_s for time_s in times_s])
        (sent, routed, replica), sequence = self._sent.pop(generation), completion.sequence
        self._router.ended(routed, replica)
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
