"""The servers that run on this machine, so that clients find them: a file for each, which only its user can read.

The files are in ``$FASTGEN_DEPLOYMENTS``, or ``fastgen/deployments`` in the user's state directory. Reading them
removes the files of processes that are gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fastgen.errors import InvalidArgumentError
from fastgen.serving.log_file import LOG_VARIABLE

_POLL_S = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A server that runs."""

    # The name by which clients call the model.
    name: str
    model: str
    # Such as ``http://127.0.0.1:8000``.
    address: str
    # Such as ``127.0.0.1:8001``; ``None`` where gRPC is not served.
    grpc_address: str | None
    # The file of its certificate, where it speaks TLS.
    certificate: str | None
    pid: int
    # The start time of the process, since process ids are reused.
    birth: str
    # Ends the server.
    token: str = field(repr=False)
    # The file of its output, where that is no terminal.
    log: str | None

    @property
    def is_alive(self) -> bool:
        return process_birth(self.pid) == self.birth

    def wait_until_gone(self) -> None:
        """Waits until the process has ended."""
        while self.is_alive:
            time.sleep(_POLL_S)


def deployments_directory() -> Path:
    """Returns the directory of the files."""
    if given := os.environ.get("FASTGEN_DEPLOYMENTS"):
        return Path(given).absolute()
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        raise InvalidArgumentError("this user has no home directory; set FASTGEN_DEPLOYMENTS to another") from None
    return state.absolute() / "fastgen" / "deployments"


def make_deployments_directory() -> Path:
    """Returns the directory of the files, made where it is missing. Raises ``InvalidArgumentError`` where it cannot be
    written to."""
    directory = deployments_directory()
    advice = "set FASTGEN_DEPLOYMENTS to another directory"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"{directory} cannot be made: {error.strerror}; {advice}") from None
    if not os.access(directory, os.W_OK):
        raise InvalidArgumentError(f"{directory} cannot be written to; {advice}")
    return directory


@contextmanager
def registered(deployment: Deployment) -> Iterator[None]:
    """Lets clients find ``deployment`` while the block runs. If its file cannot be written, that is logged and the
    server continues, since clients may know its address."""
    file: Path | None = None
    try:
        file = _write(deployment)
    except (OSError, InvalidArgumentError) as error:
        _log.warning("clients cannot find this server by its name, only by its address: %s", error)
    try:
        yield
    finally:
        if file is not None:
            file.unlink(missing_ok=True)


def _write(deployment: Deployment) -> Path:
    """Writes the file of ``deployment`` and returns its path."""
    file = make_deployments_directory() / f"{deployment.pid}.json"
    file.unlink(missing_ok=True)  # a file of an ended process with the same id
    written = file.with_suffix(".new")
    written.unlink(missing_ok=True)
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        json.dump(asdict(deployment), out)
    written.replace(file)  # atomically, so that no client reads half of it
    return file


def deployments() -> list[Deployment]:
    """Returns the running servers, the oldest first."""
    found = []
    for file in deployments_directory().glob("*.json"):
        try:
            began_s = file.stat().st_mtime
            deployment = Deployment(**json.loads(file.read_text()))
        except FileNotFoundError:
            continue  # the server has just ended
        except (ValueError, TypeError):
            raise InvalidArgumentError(f"{file}: is not the file of a server; remove it") from None
        if deployment.is_alive:
            found.append((began_s, deployment.pid, deployment))
        else:
            file.unlink(missing_ok=True)
    return [deployment for *_, deployment in sorted(found, key=lambda one: one[:2])]


def deployment_at(address: str) -> Deployment | None:
    """Returns the server of this machine with this HTTP or gRPC address, if there is one."""
    with contextlib.suppress(InvalidArgumentError):  # of a file that is no deployment's: an address needs none
        for one in deployments():
            if address.rstrip("/") in (one.address, one.grpc_address):
                return one
    return None


def find_deployment(name: str) -> Deployment:
    """Returns the server with this name, or of this model. Raises ``InvalidArgumentError`` for none, or several."""
    running = deployments()
    matching = [one for one in running if one.name == name] or [one for one in running if one.model == name]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise InvalidArgumentError(
            f"{name!r} is not served on this machine; {_listed(running) or 'nothing is'}. Start it with fastgen.serve "
            "or `fastgen serve`, or give an address such as http://host:8000"
        )
    raise InvalidArgumentError(
        f"{name!r} is served {len(matching)} times: {_listed(matching)}. Say which by its address, or give each a name"
    )


def this_deployment(
    *, name: str, model: str, address: str, grpc_address: str | None, certificate: Path | None, token: str
) -> Deployment:
    """Returns the deployment of this process."""
    birth = process_birth(os.getpid())
    assert birth is not None, "this process lives"
    return Deployment(
        name=name,
        model=model,
        address=address,
        grpc_address=grpc_address,
        certificate=None if certificate is None else str(certificate.absolute()),
        pid=os.getpid(),
        birth=birth,
        token=token,
        log=os.environ.get(LOG_VARIABLE),
    )


def process_birth(pid: int) -> str | None:
    """Returns a value that no other process with this id has; ``None`` where the process is unknown or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _birth_without_proc(pid)
    return None if fields[0] in "ZX" else fields[19]


def _birth_without_proc(pid: int) -> str | None:
    if Path("/proc/self/stat").exists():
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return "unknown"
    return None


def _listed(some: list[Deployment]) -> str:
    return ", ".join(f"{one.name} at {one.address}" for one in some)
