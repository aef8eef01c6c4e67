"""The servers that run on this machine, so that clients find them: a file for each, which only its user can read.

The files are in ``$FASTGEN_DEPLOYMENTS``, or ``fastgen/deployments`` in the user's state directory. Machines may share
that directory, such as a home directory of a cluster; each reads the files of its own servers only. Reading them
removes the files of processes that are gone. A file that is not a server's is skipped, with a warning. A directory that
another user of the machine could write to is refused: its servers would get prompts and keys that are not for them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from fastgen.errors import InvalidArgumentError
from fastgen.ownership import is_foreign, why_untrusted
from fastgen.serving.monitoring.log_file import LOG_VARIABLE

_POLL_S = 0.02
# Most bytes in the file of a server; a real one has a few hundred.
MAX_FILE_BYTES = 1 << 16
_ADVICE = "set FASTGEN_DEPLOYMENTS to another directory"
_HOW_TO_START = "Start it with fastgen.serve or `fastgen serve`, or give an address such as http://host:8000"
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
    # The name of the machine that its process runs on.
    host: str
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
    """Returns the directory of the files, without links, which another user may point elsewhere later.

    Raises ``InvalidArgumentError`` if another user could write to it.
    """
    directory = Path(os.path.realpath(_named_directory()))
    if (reason := why_untrusted(directory)) is not None:
        raise InvalidArgumentError(f"{directory} is not used for the list of servers: {reason}; {_ADVICE}")
    return directory


def _named_directory() -> Path:
    """Returns the directory that the environment names. Raises ``InvalidArgumentError`` if it is a file."""
    given = os.environ.get("FASTGEN_DEPLOYMENTS")
    directory = Path(given).absolute() if given else _usual_directory()
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise InvalidArgumentError(f"{directory} is a file, not a directory; {_ADVICE}")
    return directory


def _usual_directory() -> Path:
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        raise InvalidArgumentError("this user has no home directory; set FASTGEN_DEPLOYMENTS to another") from None
    return state.absolute() / "fastgen" / "deployments"


def make_deployments_directory() -> Path:
    """Returns the directory of the files, made where it is missing. Raises ``InvalidArgumentError`` where it cannot be
    written to."""
    directory = _named_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"{directory} cannot be made: {error.strerror}; {_ADVICE}") from None
    if not os.access(directory, os.W_OK):
        raise InvalidArgumentError(f"{directory} cannot be written to; {_ADVICE}")
    return deployments_directory()


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
    file = make_deployments_directory() / f"{deployment.host}-{deployment.pid}.json"
    file.unlink(missing_ok=True)  # a file of an ended process with the same id
    written = file.with_suffix(".new")
    written.unlink(missing_ok=True)
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        json.dump(asdict(deployment), out)
    written.replace(file)  # atomically, so that no client reads half of it
    return file


def deployments() -> list[Deployment]:
    """Returns the running servers of this machine, the oldest first."""
    found = []
    for file in deployments_directory().glob("*.json"):
        try:
            began_s, deployment = _read(file)
        except FileNotFoundError:
            continue  # the server has just ended
        except (OSError, ValueError, RecursionError) as error:  # RecursionError: JSON that is nested too deep
            _log.warning("%s is not the file of a server and is skipped (%s); remove it", file, _reason(error))
            continue
        if deployment.host != socket.gethostname():
            continue  # its process cannot be seen from here
        if deployment.is_alive:
            found.append((began_s, deployment.pid, deployment))
        else:
            file.unlink(missing_ok=True)
    return [deployment for *_, deployment in sorted(found, key=lambda one: one[:2])]


def _read(file: Path) -> tuple[float, Deployment]:
    """Returns when ``file`` was written, in seconds, and its deployment. Raises ``OSError``, ``ValueError`` or
    ``RecursionError`` for anything that is not the file of a server."""
    # Opening a FIFO would wait for a writer, and a link may lead to another user's file.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is not a regular file")
        if is_foreign(facts):
            raise ValueError("it belongs to another user")
        text = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    value = json.loads(text)
    if not isinstance(value, dict) or value.keys() != {each.name for each in fields(Deployment)}:
        raise ValueError("its fields are not those of a server")
    optional = ("grpc_address", "certificate", "log")
    for name, given in value.items():
        is_missing = given is None and name in optional
        if not is_missing and type(given) is not (int if name == "pid" else str):
            raise ValueError(f"its field {name!r} is {given!r:.40}")
    return facts.st_mtime, Deployment(**value)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):  # of a link that is not followed, the system says that there are too many
        return "it is a link" if error.errno == errno.ELOOP else str(error.strerror)
    return str(error)


def deployment_at(address: str) -> Deployment | None:
    """Returns the server of this machine with this HTTP or gRPC address, if there is one."""
    with contextlib.suppress(InvalidArgumentError):  # about the directory, which an address does not need
        for one in deployments():
            if address.rstrip("/") in (one.address, one.grpc_address):
                return one
    return None


def find_deployment(name: str, *, advice: str = _HOW_TO_START) -> Deployment:
    """Returns the server with this name, or of this model. Raises ``InvalidArgumentError`` for none, with the
    ``advice``, or for several."""
    running = deployments()
    matching = [one for one in running if one.name == name] or [one for one in running if one.model == name]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise InvalidArgumentError(
            f"{name!r} is not served on this machine; {_listed(running) or 'nothing is'}. {advice}"
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
        host=socket.gethostname(),
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
