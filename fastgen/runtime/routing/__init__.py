"""Which replica of a server gets a request. Plain Python, used by the simulator and by the server's load balancer."""

from fastgen.runtime.routing.block_hashes import block_hashes
from fastgen.runtime.routing.registry import ROUTERS, make_router
from fastgen.runtime.routing.router import RoutedRequest, Router

__all__ = ["ROUTERS", "RoutedRequest", "Router", "block_hashes", "make_router"]
