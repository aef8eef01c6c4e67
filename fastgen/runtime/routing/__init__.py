"""Chooses the replica of a server that gets a request. The simulator and the server's load balancer share this code."""

from fastgen.runtime.routing.block_hashes import block_hashes
from fastgen.runtime.routing.registry import ROUTERS, make_router
from fastgen.runtime.routing.router import RoutedRequest, Router

__all__ = ["ROUTERS", "RoutedRequest", "Router", "block_hashes", "make_router"]
