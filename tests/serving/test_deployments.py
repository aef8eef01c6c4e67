"""Deployments: started from Python or the shell, found, distinguished, and ended with a token or a key."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fastgen
from fastgen import ownership
from fastgen.errors import FastgenError, InvalidArgumentError
from fastgen.runtime.scheduling.policies import DynamicBatching
from fastgen.serving import detached
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.clients import deployments as module
from fastgen.serving.clients.deployments import (
    MAX_FILE_BYTES,
    Deployment,
    deployment_at,
    deployments,
    deployments_directory,
    find_deployment,
    process_birth,
    registered,
)
from fastgen.serving.ending import Ending
from fastgen.serving.monitoring.log import set_up_logging
from tests.runtime.checkpoints import save_checkpoint, save_tokenizer

SCRIPT = """
import sys, fastgen
client = fastgen.serve("tiny-opt", port=0, grpc_port=0, name="stories", max_num_seqs=3)
print(client.generate("Once upon a time", max_new_tokens=4, temperature=0, ignore_eos=True).token_ids)
"""


HERE = socket.gethostname()


def stand_in(
    name: str, *, model: str = "m", pid: int | None = None, birth: str | None = None, host: str = HERE
) -> Deployment:
    """Returns an entry for this process."""
    return Deployment(
        name=name,
        model=model,
        address=f"http://127.0.0.1:1/{name}",
        grpc_address=None,
        certificate=None,
        host=host,
        pid=os.getpid() if pid is None else pid,
        birth=birth or str(process_birth(os.getpid())),
        token="secret",
        log=None,
    )


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTGEN_DEPLOYMENTS", str(tmp_path / "state" / "deployments"))
    return tmp_path / "state" / "deployments"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_it_outlives_its_script_and_is_found_again(directory: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (found,) = deployments()
    try:
        with fastgen.load("tiny-opt") as llm:
            wanted = llm.generate("Once upon a time", max_new_tokens=4, temperature=0, ignore_eos=True).token_ids
        assert json.loads(done.stdout) == wanted
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / f"{HERE}-{found.pid}.json").stat().st_mode) == 0o600
        assert found.token not in repr(found)
        assert found.log is not None
        assert found.address in Path(found.log).read_text()
        for name, protocol in (("stories", "grpc"), ("tiny-opt", "http")):
            with fastgen.client(name, protocol=protocol) as client:  # type: ignore[arg-type]
                assert client.info()["model"] == "stories"
                assert client.info()["max_num_seqs"] == 3
                assert (
                    client.generate("Once upon a time", max_new_tokens=4, temperature=0, ignore_eos=True).token_ids
                    == wanted
                )
        fastgen.client("stories").terminate_server()
        assert not found.is_alive
        assert deployments() == []
    finally:
        if found.is_alive:
            os.kill(found.pid, signal.SIGKILL)


@pytest.mark.slow  # tests of the library have what is reported; here the server and its engine must not both do it
def test_a_tokenizer_smaller_than_the_vocabulary_is_reported_once(directory: Path, tmp_path: Path) -> None:
    save_tokenizer(save_checkpoint("llama", tmp_path / "model"))
    client = fastgen.serve(tmp_path / "model", port=0, target="torch")
    (found,) = deployments()
    try:
        assert client.generate("the cat", max_new_tokens=2).token_ids
    finally:
        client.terminate_server()
    assert Path(str(found.log)).read_text().count("the tokenizer knows") == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"dtype": "int3"}, "dtype='int3'"),
        pytest.param({"kv_cache_memory": "1KiB"}, "kv_cache_memory", marks=pytest.mark.slow),
        pytest.param(
            {"policy": DynamicBatching(batch_size=99), "max_num_seqs": 2},
            "batch_size=99 is above max_num_seqs=2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_why_it_cannot_start_is_said_in_its_own_words(directory: Path, arguments: dict[str, object], why: str) -> None:
    with pytest.raises(FastgenError, match=why):
        fastgen.serve("tiny-opt", port=0, **arguments)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"prot": 1}, "'prot' is neither an argument of fastgen.load nor one of serving"),
        ({"protocol": "grpc"}, "needs a grpc_port"),
        ({"recipe": object()}, "cannot be handed to another process"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    directory: Path, arguments: dict[str, object], why: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        fastgen.serve("tiny-opt", **arguments)
    assert not directory.exists()


def test_paths_and_policies_reach_the_server_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, str]] = []

    def start(request: str, title: str) -> Deployment:
        started.append((json.loads(request), title))
        return stand_in("one")

    monkeypatch.setattr(detached, "_start", start)
    policy = DynamicBatching(batch_size=4, max_delay_s=0.02)
    fastgen.serve(Path("models/tiny"), recipe=Path("a.yaml"), policy=policy).close()
    ((request, title),) = started
    assert request == {
        "model": "models/tiny",
        "recipe": "a.yaml",
        "policy": {"name": "dynamic", "batch_size": 4, "max_delay_s": 0.02},
    }
    assert title == "tiny"


def test_a_server_that_ends_without_a_word_is_told_with_its_log(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\ncat > /dev/null\necho no library >&2\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(FastgenError, match="the server ended with status 7 before it was ready") as raised:
        fastgen.serve("tiny-opt", port=0)
    (log,) = directory.iterdir()
    assert str(raised.value).endswith(f"its output is in {log}")


def test_a_server_that_ends_before_it_has_read_its_arguments_is_told_too(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    site = f"https://{'a' * 200_000}.org"  # more than a pipe holds
    with pytest.raises(FastgenError, match="the server ended with status 7 before it was ready"):
        fastgen.serve("tiny-opt", port=0, allow_origins=[site])


def test_a_server_whose_start_is_interrupted_is_ended(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Interrupted(io.BytesIO):
        def write(self, text: Any) -> int:
            raise KeyboardInterrupt

    class Started:
        def __init__(self, command: list[str], **more: Any):
            self.stdin = Interrupted()

        def send_signal(self, number: signal.Signals) -> None:
            seen.append(number)

        def wait(self) -> int:
            seen.append("has ended")
            return 0

    monkeypatch.setattr(subprocess, "Popen", Started)
    with pytest.raises(KeyboardInterrupt):
        fastgen.serve("tiny-opt", port=0)
    assert seen == [signal.SIGTERM, "has ended"]


def test_a_server_whose_entry_cannot_be_written_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTGEN_DEPLOYMENTS", str(tmp_path / "file" / "deployments"))
    log = set_up_logging("text")
    with registered(stand_in("one")):
        log.flush()
        printed = capfd.readouterr().err
    assert "clients cannot find this server by its name" in printed
    assert "set FASTGEN_DEPLOYMENTS" in printed
    with pytest.raises(InvalidArgumentError, match="set FASTGEN_DEPLOYMENTS"):
        fastgen.serve("tiny-opt", port=0)


def test_one_name_is_one_deployment(directory: Path, sleeper: subprocess.Popen[bytes]) -> None:
    other = stand_in("two", pid=sleeper.pid, birth=process_birth(sleeper.pid))
    with registered(stand_in("one")), registered(other):
        assert find_deployment("one").name == "one"
        assert find_deployment("two").name == "two"
        with pytest.raises(InvalidArgumentError, match=r"'m' is served 2 times: (one|two) at .*, (one|two) at "):
            find_deployment("m")
        with pytest.raises(InvalidArgumentError, match=r"'three' is not served on this machine; one at .*, two at "):
            find_deployment("three")
    assert deployments() == []


def test_an_address_of_this_machine_is_its_deployment_by_either_protocol(directory: Path) -> None:
    one, two = stand_in("one"), replace(stand_in("two"), grpc_address="127.0.0.1:2")
    with registered(two):
        assert deployment_at(two.address + "/") == deployment_at("127.0.0.1:2") == two
        assert deployment_at(one.address) is None
        with pytest.raises(FastgenError, match=r"no server answers at 127\.0\.0\.1:2"):
            fastgen.client(two.address, protocol="grpc").generate("a")
    with pytest.raises(InvalidArgumentError, match="http://here:1 is an address of HTTP; that of gRPC"):
        fastgen.client("http://here:1", protocol="grpc").generate("a")


def test_entries_of_dead_processes_are_removed(directory: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with registered(stand_in("gone", pid=sleeper.pid, birth=process_birth(sleeper.pid))):
        assert [one.name for one in deployments()] == ["gone"]
        sleeper.kill()
        sleeper.wait()
        assert deployments() == []
        assert list(directory.iterdir()) == []
    with registered(stand_in("of another time", birth="1")):  # the same process id, but not the same process
        assert deployments() == []


def test_servers_are_listed_the_oldest_first(directory: Path, sleeper: subprocess.Popen[bytes]) -> None:
    other = stand_in("other", pid=sleeper.pid, birth=process_birth(sleeper.pid))
    with registered(stand_in("own")), registered(other):
        for own_s, other_s, expected in ((100, 200, ["own", "other"]), (300, 200, ["other", "own"])):
            os.utime(directory / f"{HERE}-{os.getpid()}.json", (own_s, own_s))
            os.utime(directory / f"{HERE}-{sleeper.pid}.json", (other_s, other_s))
            assert [one.name for one in deployments()] == expected


def test_a_process_that_has_ended_is_gone_before_anybody_has_asked_how(sleeper: subprocess.Popen[bytes]) -> None:
    assert process_birth(sleeper.pid) is not None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert process_birth(sleeper.pid) is None


def test_the_list_of_servers_is_in_the_users_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGEN_DEPLOYMENTS")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert deployments_directory() == tmp_path / "state" / "fastgen" / "deployments"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    assert deployments_directory() == tmp_path / "home" / ".local" / "state" / "fastgen" / "deployments"


def test_a_process_of_a_system_without_proc_is_known_to_run_or_not(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgen.serving.clients.deployments.Path", lambda name: tmp_path / name[1:])
    assert process_birth(sleeper.pid) == "unknown"
    sleeper.kill()
    sleeper.wait()
    assert process_birth(sleeper.pid) is None


def test_entries_of_other_machines_that_share_the_directory_are_left_alone(directory: Path) -> None:
    elsewhere = stand_in("elsewhere", host="another", birth="1")  # with the same process id as this process
    with registered(stand_in("here")), registered(elsewhere):
        assert [one.name for one in deployments()] == ["here"]
        assert len(list(directory.iterdir())) == 2


def test_a_detached_server_that_fails_after_it_was_ready_writes_the_reason_to_its_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    other = tmp_path / "other"

    def run(arguments: object, options: object, *, on_ready: Callable[[Deployment], None]) -> None:
        on_ready(stand_in("one"))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(writing)
        opened = os.open(other, os.O_WRONLY | os.O_CREAT)
        if opened != writing:  # another file gets the number of the pipe
            os.dup2(opened, writing)
            os.close(opened)
        raise FastgenError("the engine did not start 3 times in a row")

    monkeypatch.setattr("fastgen.serving.run.run", run)
    monkeypatch.setattr(sys, "argv", ["detached", str(writing)])
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"model": "m"}'))
    with os.fdopen(reading) as answer:
        with pytest.raises(SystemExit) as ended:
            detached._main()
        assert ended.value.code == 1
        assert json.load(answer)["deployment"]["name"] == "one"
    os.close(writing)
    assert other.read_bytes() == b""
    assert capfd.readouterr().err == "fastgen: the engine did not start 3 times in a row\n"


def test_where_nothing_is_served_that_is_said(directory: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="'tiny-llama' is not served on this machine; nothing is"):
        fastgen.client("tiny-llama")


def as_text(**changes: object) -> str:
    return json.dumps({**asdict(stand_in("two")), **changes})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda file: file.write_text("{"), "Expecting property name"),
        (lambda file: file.write_text("{}"), "its fields are not those of a server"),
        (lambda file: file.write_text(as_text(more=1)), "its fields are not those of a server"),
        (lambda file: file.write_text(as_text(pid="1")), "its field 'pid' is '1'"),
        (lambda file: file.write_text(as_text(name=None)), "its field 'name' is None"),
        (lambda file: file.write_text("[" * 60_000), "recursion"),
        (lambda file: file.write_bytes(b"\xff\xfe\xff"), "decode"),
        (lambda file: file.write_text(" " * MAX_FILE_BYTES + "{}"), "more than 65536 bytes"),
        (lambda file: file.mkdir(), "not a regular file"),
        (lambda file: os.mkfifo(file), "not a regular file"),
        (lambda file: file.symlink_to("/proc/self/status"), "(it is a link)"),
    ],
    ids=["cut", "empty", "surplus", "text", "nameless", "nested", "binary", "large", "directory", "fifo", "link"],
)
def test_a_file_that_is_not_a_servers_is_skipped_and_reported(
    directory: Path,
    capfd: pytest.CaptureFixture[str],
    make: Callable[[Path], object],
    reason: str,
) -> None:
    log = set_up_logging("text")
    with registered(stand_in("one")):
        junk = directory / "junk.json"
        make(junk)
        assert find_deployment("one").name == "one"
        log.flush()
        (said,) = capfd.readouterr().err.splitlines()
        assert said.startswith(f"fastgen: warning: {junk} is not the file of a server and is skipped (")
        assert reason in said
        assert os.path.lexists(junk)


def test_a_file_of_another_user_is_skipped(
    directory: Path,
    sleeper: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = set_up_logging("text")
    theirs = stand_in("theirs", pid=sleeper.pid, birth=process_birth(sleeper.pid))
    with registered(stand_in("one")), registered(theirs):
        planted = (directory / f"{HERE}-{sleeper.pid}.json").stat().st_ino
        monkeypatch.setattr(module, "is_foreign", lambda facts: facts.st_ino == planted)
        assert [one.name for one in deployments()] == ["one"]
        log.flush()
        assert "(it belongs to another user)" in capfd.readouterr().err


def test_a_file_in_place_of_the_directory_is_refused(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A list of it would be empty, as if nothing were served."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.touch()
    said = f"{directory} is a file, not a directory; set FASTGEN_DEPLOYMENTS"
    with pytest.raises(InvalidArgumentError, match=re.escape(said)):
        deployments()
    log = set_up_logging("text")
    with registered(stand_in("one")):
        log.flush()
    assert said in capfd.readouterr().err


def test_a_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers would get the prompts that are for one's own."""
    with registered(stand_in("victim")):
        somebody_else = frozenset((directory.stat().st_uid + 1,))
        monkeypatch.setattr(ownership, "trusted_users", lambda: somebody_else)
        for call in (lambda: fastgen.client("victim"), deployments, lambda: fastgen.serve("tiny-opt", port=0)):
            with pytest.raises(InvalidArgumentError, match=r"belongs to another user, .*; set FASTGEN_DEPLOYMENTS"):
                call()
        assert deployment_at(stand_in("victim").address) is None, "an address needs no list"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(
    directory: Path, capfd: pytest.CaptureFixture[str], mode: int
) -> None:
    directory.mkdir(parents=True)
    directory.chmod(mode)
    with pytest.raises(InvalidArgumentError, match="other users may write to it; `chmod go-w "):
        fastgen.client("victim")
    log = set_up_logging("text")
    with registered(stand_in("one")):
        log.flush()
        assert "clients cannot find this server by its name" in capfd.readouterr().err
    assert list(directory.iterdir()) == []


def test_only_its_user_can_read_the_file_of_a_server(directory: Path) -> None:
    directory.parent.mkdir()
    mask = os.umask(0)
    try:
        with registered(stand_in("one")):
            (file,) = directory.iterdir()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        os.umask(mask)


def test_a_file_that_was_left_half_written_is_replaced(directory: Path) -> None:
    with registered(stand_in("one")):
        (file,) = directory.iterdir()
        file.with_suffix(".new").write_text("{")
        with registered(stand_in("another")):
            assert [one.name for one in deployments()] == ["another"]
            assert list(directory.iterdir()) == [file]
    assert list(directory.iterdir()) == []


def test_a_file_may_have_65536_bytes(directory: Path) -> None:
    with registered(stand_in("one")):
        (file,) = directory.iterdir()
        text = file.read_text()
        for size, names in ((65_536, ["one"]), (65_537, [])):
            file.write_text(" " * (size - len(text)) + text)
            assert [one.name for one in deployments()] == names


@pytest.mark.parametrize("is_reversed", [False, True])
def test_servers_that_began_together_are_listed_by_their_processes(
    directory: Path, is_reversed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    births = {pid: str(process_birth(pid)) for pid in (os.getpid(), os.getppid())}
    with ExitStack() as entries:
        for pid, birth in births.items():
            entries.enter_context(registered(stand_in(str(pid), pid=pid, birth=birth)))
            os.utime(directory / f"{HERE}-{pid}.json", (100, 100))
        files = sorted(directory.glob("*.json"), reverse=is_reversed)
        monkeypatch.setattr(module, "deployments_directory", lambda: SimpleNamespace(glob=lambda pattern: files))
        assert [one.pid for one in deployments()] == sorted(births)


def test_the_birth_of_a_process_is_its_start_in_ticks_of_the_system() -> None:
    def ticks() -> float:
        return float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")

    before = ticks()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        birth = process_birth(process.pid)
        process.kill()
    assert before - 2 <= int(str(birth)) <= ticks() + 2


def test_a_process_of_a_system_without_proc_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr("fastgen.serving.clients.deployments.Path", lambda name: tmp_path / name[1:])
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    assert process_birth(os.getpid()) == "unknown"
    assert signals == [(os.getpid(), 0)]


def test_the_token_of_a_server_is_not_printed() -> None:
    for one in (stand_in("one"), Ending("secret", ApiKeys(), lambda: None)):
        assert "secret" not in repr(one)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_detached_server_has_a_session_of_its_own_and_writes_errors_to_the_terminal_or_its_log(
    directory: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    class Started:
        def __init__(self, command: list[str], **given: Any):
            found.update(given, command=command, log=os.readlink(f"/proc/self/fd/{given['stdout'].fileno()}"))
            self.stdin = io.BytesIO()
            os.write(given["pass_fds"][0], json.dumps({"deployment": asdict(stand_in("one"))}).encode())

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(sys, "stderr", Stream())
    fastgen.serve("tiny-opt", port=0).close()
    assert found["command"][:-1] == [sys.executable, "-m", "fastgen.serving.detached"]
    assert found["start_new_session"]
    assert found["pass_fds"] == (int(found["command"][-1]),)
    assert found["stderr"] is (None if is_terminal else found["stdout"])
    assert found["env"]["FASTGEN_SERVE_LOG"] == found["log"]
    assert Path(found["log"]).parent == directory
