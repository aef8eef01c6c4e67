"""The memory that requests may take beside what the memory ledger lists."""

from __future__ import annotations

from fastgen.runtime.sampling.kept_formats import FORMAT_BYTES, MOST_GROWTH, most_in_use
from fastgen.serving.admission.bodies import max_bytes
from fastgen.serving.admission.request_limits import max_logprob_bytes
from fastgen.serving.options import ServeOptions

# gRPC counts the bytes of a request once it has all of it. As many again may be on their way, and as many again on
# their way to the methods that need no key, since gRPC has one limit for the requests of all methods.
GRPC_PARTS = 3


def request_memory(options: ServeOptions, memory_bytes: int) -> str:
    """Returns a line with the most that open requests take on a machine with ``memory_bytes``. The first bytes of each
    body are not in it, nor what is made of bodies.
    """
    bodies_bytes = max_bytes(options.connections)
    sizes = {"log-probabilities": max_logprob_bytes(memory_bytes), "bodies by HTTP": bodies_bytes}
    if options.grpc_port is not None:
        sizes["bodies by gRPC"] = GRPC_PARTS * bodies_bytes
    sizes["their formats"] = MOST_GROWTH * FORMAT_BYTES * most_in_use(memory_bytes)
    parts = ", ".join(f"{what} {size / 2**20:,.2f} MiB" for what, size in sizes.items())
    return f"requests may take beside that, at most: {parts}"
