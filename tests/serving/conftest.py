from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import fastgen
from fastgen.serving.clients.deployments import Deployment, deployments
from tests.serving.server_process import ServerProcess, served


@pytest.fixture(scope="session", autouse=True)
def deployments_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the servers of tests apart from others on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "FASTGEN_DEPLOYMENTS", str(tmp_path_factory.mktemp("deployments")))
        yield


@pytest.fixture(scope="session")
def server(deployments_directory: None) -> Iterator[ServerProcess]:
    """A server of tiny-llama, by HTTP and gRPC, shared by tests that do not change it. More flags may come from the
    environment: ``FASTGEN_TEST_SERVE="--replicas 2"`` runs these tests over replicas.
    """
    with served("tiny-llama", "--grpc-port", "0", *os.environ.get("FASTGEN_TEST_SERVE", "").split()) as process:
        yield process


@pytest.fixture(scope="session")
def deployment(server: ServerProcess) -> Deployment:
    """The deployment by which clients find it."""
    (found,) = [one for one in deployments() if one.address == server.address]
    return found


@pytest.fixture(scope="session")
def llm() -> Iterator[fastgen.LLM]:
    """The same model in this process, for the expected answers."""
    with fastgen.load("tiny-llama") as llm:
        yield llm
