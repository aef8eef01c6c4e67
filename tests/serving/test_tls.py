"""TLS handshakes: how many, how long, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ctypes.util
import gc
import re
import socket
import ssl
import time
from itertools import pairwise
from pathlib import Path

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.serving.http import tls
from fastgen.serving.http.connection import LimitedConnection
from fastgen.serving.http.server import FLUSH_S
from fastgen.serving.http.tls import Handshakes, TlsHandshake, handshake_cpu_s, tls_context
from fastgen.serving.options import ConnectionLimits, ServeOptions
from tests.serving.attacks.connections import idle_connections
from tests.serving.attacks.harness import Target
from tests.serving.attacks.storm import target_of
from tests.serving.local_server import Served, check, post
from tests.serving.server_process import served

CERTIFICATE = Path(__file__).with_name("tls") / "certificate.pem"  # for 127.0.0.1
KEY = CERTIFICATE.with_name("key.pem")


def options(**limits: float) -> ServeOptions:
    return ServeOptions(port=0, tls_cert=CERTIFICATE, tls_key=KEY, connections=ConnectionLimits(**limits))  # type: ignore[arg-type]


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def refused(server: Served) -> dict[str, str]:
    counted = re.findall(r'^fastgen_refused_total{reason="(\w+)"} ([1-9].*)$', server.metrics.text().decode(), re.M)
    return dict(counted)


def test_requests_are_answered_over_one_connection_and_several() -> None:
    async def test(server: Served) -> None:
        client = await server.connect(trusting())
        body = bytes(range(256)) * 4000
        for _ in range(3):
            client.writer.write(post("/echo", body))
            assert (await client.response())[2] == body
        client.writer.close()
        answers = await asyncio.gather(*(server.ask(post("/echo", body), trusting()) for _ in range(8)))
        assert [answer[2] for answer in answers] == [body] * 8
        assert len(server.http.server_state.connections) <= 9
        await server.until_closed()

    check(test, options())


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered() -> None:
    """The last message of the client's handshake and its request are one write."""

    async def test(server: Served) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        plain = await server.connect()
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.writer.write(outgoing.read())
                incoming.write(await plain.reader.read(65_536))
        client.write(post("/echo", b"early"))
        plain.writer.write(outgoing.read())
        answer = b""
        while b"early" not in answer:
            try:
                answer += client.read(65_536)
            except ssl.SSLWantReadError:
                incoming.write(await plain.reader.read(65_536))
        plain.writer.close()
        await server.until_closed()

    check(test, options())


def test_handshakes_that_do_not_end_are_counted_and_limited_in_time() -> None:
    async def test(server: Served) -> None:
        clients = [await server.connect() for _ in range(10)]
        while len(server.http.server_state.connections) < 10:
            await asyncio.sleep(0.01)
        assert "fastgen_connections 10.0" in server.metrics.text().decode()
        began_s = asyncio.get_running_loop().time()
        for client in clients:
            assert await client.reader.read() == b""
        assert asyncio.get_running_loop().time() - began_s < 10, "the loop's own limit is a minute"
        await server.until_closed()
        assert refused(server) == {"head_time": "10.0"}
        assert (await server.ask(post("/echo", b"abc"), trusting()))[2] == b"abc"

    check(test, options(header_timeout_s=0.5))


def test_handshakes_beyond_the_limit_are_closed_at_once() -> None:
    async def test(server: Served) -> None:
        clients = [await server.connect() for _ in range(30)]
        ended = [asyncio.create_task(client.reader.read()) for client in clients]
        done, waiting = await asyncio.wait(ended, timeout=1.0)
        assert (len(done), len(waiting)) == (20, 10)
        assert len(server.http.server_state.connections) == 10
        assert refused(server) == {"connections": "20.0"}
        for task in waiting:
            task.cancel()

    check(test, options(max_connections=5, header_timeout_s=15))


def test_connections_beyond_the_limit_get_an_error() -> None:
    async def test(server: Served) -> None:
        clients = [await server.connect(trusting()) for _ in range(3)]
        for client in clients:
            client.writer.write(post("/echo", b"abc"))
            assert (await client.response())[0] == 200
        assert (await server.ask(post("/echo", b"abc"), trusting()))[0] == 429
        for client in clients:
            client.writer.close()

    check(test, options(max_connections=3))


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\x16\x03\x01", bytes(300)])
def test_what_is_no_handshake_ends_the_connection(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        client.writer.write(sent)
        client.writer.write_eof()
        assert b"HTTP" not in await client.reader.read()
        await server.until_closed()

    check(test, options())
    assert [record.levelname for record in caplog.records if record.levelno > 30] == []


def test_the_attack_of_idle_connections() -> None:
    async def test(server: Served) -> None:
        await idle_connections(Target(f"http://127.0.0.1:{server.port}"), 40)
        await server.until_closed()

    check(test, options(max_connections=10, header_timeout_s=0.5))


@pytest.mark.parametrize("more", [(), ("connection: close",)], ids=["kept", "closed"])
def test_a_client_that_is_slow_gets_its_whole_answer(more: tuple[str, ...]) -> None:
    """An answer waits longer for its client than a connection without one."""
    body = bytes(12 << 20)

    def take(port: int) -> bytes:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        plain.connect(("127.0.0.1", port))
        with trusting().wrap_socket(plain, server_hostname="127.0.0.1") as client:
            client.sendall(post("/echo", body, *more))
            found = client.recv(1000)
            time.sleep(2.0)
            while not found.endswith(b"\r\n0\r\n\r\n") and (piece := client.recv(1 << 20)):
                found += piece
        return found

    async def test(server: Served) -> None:
        found = await asyncio.to_thread(take, server.port)
        assert found.endswith(b"\r\n0\r\n\r\n")
        assert len(found) > len(body)

    check(test, options(keep_alive_s=0.3))


@pytest.mark.parametrize("has_asked", [True, False])
def test_a_server_that_ends_waits_a_second_for_clients_that_do_not_look(
    has_asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that keeps a connection for later reads nothing of it, and does not agree to its end."""
    kept: list[ssl.SSLSocket] = []

    def connect(port: int) -> None:
        client = trusting().wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1")
        kept.append(client)
        if has_asked:
            client.sendall(post("/echo", b"abc"))
            assert client.recv(65_536).startswith(b"HTTP/1.1 200")

    async def test(server: Served) -> None:
        await asyncio.to_thread(connect, server.port)
        while not any(isinstance(each, LimitedConnection) for each in server.http.server_state.connections):
            await asyncio.sleep(0.01)
        before_s = time.monotonic()
        server.http.should_exit = True
        await server.until_closed()
        assert time.monotonic() - before_s < FLUSH_S - 1

    check(test, options())
    assert not caplog.records
    kept[0].close()


def test_a_server_that_ends_waits_for_no_handshake() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        while not server.http.server_state.connections:
            await asyncio.sleep(0.01)
        server.http.should_exit = True
        async with asyncio.timeout(60):
            assert await client.reader.read() == b""

    check(test, options(header_timeout_s=600))


@pytest.mark.parametrize("key", ["key_with_passphrase.pem", "none.pem", "certificate.pem"])
def test_a_key_that_cannot_be_used_is_refused_and_no_passphrase_is_asked_for(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match="without a passphrase"):
        tls_context(CERTIFICATE, CERTIFICATE.with_name(key))


def test_a_handshake_that_is_open_when_the_server_ends_is_cut() -> None:
    async def test(server: Served) -> None:
        client = await server.connect()
        while not server.http.server_state.connections:
            await asyncio.sleep(0.01)
        (connection,) = server.http.server_state.connections
        assert isinstance(connection, TlsHandshake)
        connection.abort()
        assert await client.reader.read() == b""
        await server.until_closed()

    check(test, options())


def test_a_grpc_client_that_does_not_speak_tls_leaves_no_line(tmp_path: Path) -> None:
    """Lines that gRPC's library writes to standard error itself would fill a pipe, and block the server."""
    flags = ("--grpc-port", "0", "--tls-cert", str(CERTIFICATE), "--tls-key", str(KEY))
    log = tmp_path / "log"
    with log.open("w") as file, served("tiny-llama", *flags, stderr=file.fileno()) as server:
        address = target_of(server).grpc
        host, port = address.rsplit(":", 1)
        before = log.read_text()
        for _ in range(3):
            with socket.create_connection((host, int(port)), 30.0) as client:
                client.sendall(b"GET / HTTP/1.1\r\n\r\n" * 3)
                client.settimeout(30.0)
                with contextlib.suppress(ConnectionError):
                    while client.recv(4096):
                        pass
        assert log.read_text() == before


def test_the_time_of_a_handshake_is_known() -> None:
    assert 1e-5 < handshake_cpu_s(tls_context(CERTIFICATE, KEY)) < 1.0


def test_handshakes_begin_one_after_the_other_when_something_has_come() -> None:
    begun: list[tuple[int, float]] = []

    async def run() -> None:
        handshakes = Handshakes(0.01)
        pairs = [socket.socketpair() for _ in range(4)]

        async def begin(number: int) -> None:
            assert await handshakes.may_begin(pairs[number][0])
            begun.append((number, time.monotonic()))

        beginning = [asyncio.create_task(begin(number)) for number in range(4)]
        await asyncio.sleep(0.02)
        assert begun == []
        beginning[0].cancel()
        for number in (3, 1, 2):
            pairs[number][1].send(bytes((22, 3, 1)))
            await asyncio.sleep(0)
        handshakes.put_off(0.1)
        put_off_s = time.monotonic() + 0.1
        await asyncio.gather(*beginning[1:])
        assert [number for number, _ in begun] == [3, 1, 2]
        assert begun[1][1] > put_off_s - 0.001
        for (_, earlier_s), (_, later_s) in pairwise(begun):
            assert later_s - earlier_s > 0.04 - 0.001, "a quarter of the time"
        for pair in pairs:
            for each in pair:
                each.close()

    asyncio.run(run())


def test_a_client_that_has_left_or_sends_no_handshake_takes_no_turn() -> None:
    async def run() -> None:
        handshakes = Handshakes(60.0)
        ours, theirs = socket.socketpair()
        for sent in (b"GET", b""):
            if sent:
                theirs.send(sent)
            else:
                ours.recv(3)
                theirs.close()
            async with asyncio.timeout(10.0):
                assert await handshakes.may_begin(ours) is bool(sent)
        ours.close()

    asyncio.run(run())


def test_connections_that_ask_for_keys_put_handshakes_off_together() -> None:
    handshakes = Handshakes(0.0)
    for _ in range(100):
        handshakes.put_off(0.1)
    assert handshakes._free_s - time.monotonic() <= 0.1


def test_no_handshake_is_made_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clients say hello at once; each turn of the loop has one signature at most."""
    monkeypatch.setattr("fastgen.serving.http.server.handshake_cpu_s", lambda context: 0.02)

    async def test(server: Served) -> None:
        began_s = time.monotonic()
        answers = await asyncio.gather(*(server.ask(post("/echo", b"a"), trusting()) for _ in range(6)))
        assert [answer[2] for answer in answers] == [b"a"] * 6
        assert time.monotonic() - began_s > 5 * 0.08 - 0.01

    check(test, options())


class KeyUpdates:
    """A client by the TLS library itself, since Python cannot ask for new keys."""

    def __init__(self, port: int) -> None:
        name = ctypes.util.find_library("ssl")
        if name is None:
            pytest.skip("the system has no libssl")
        self.library = ctypes.CDLL(name)
        pointer = ctypes.c_void_p
        for function in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
            getattr(self.library, function).restype = pointer
        self.library.SSL_CTX_new.argtypes = self.library.SSL_new.argtypes = [pointer]
        self.library.SSL_set_fd.argtypes = self.library.SSL_key_update.argtypes = [pointer, ctypes.c_int]
        self.library.SSL_connect.argtypes = self.library.SSL_do_handshake.argtypes = [pointer]
        self.library.SSL_write.argtypes = self.library.SSL_read.argtypes = [pointer, ctypes.c_char_p, ctypes.c_int]
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket.setblocking(True)
        self.connection = self.library.SSL_new(self.library.SSL_CTX_new(self.library.TLS_client_method()))
        self.library.SSL_set_fd(self.connection, self.socket.fileno())
        assert self.library.SSL_connect(self.connection) == 1

    def update(self, number: int) -> int:
        """Asks for new keys ``number`` times, and returns how often that could be sent."""
        for done in range(number):
            asked = self.library.SSL_key_update(self.connection, 1) == 1
            if not asked or self.library.SSL_do_handshake(self.connection) != 1:
                return done
        return number

    def ask(self, request: bytes) -> bytes:
        """Returns the answer, in chunks; empty if there is none."""
        self.library.SSL_write(self.connection, request, len(request))
        piece, answer = ctypes.create_string_buffer(1000), b""
        while not answer.endswith(b"0\r\n\r\n"):
            num_bytes = self.library.SSL_read(self.connection, piece, 1000)
            if num_bytes <= 0:
                break
            answer += piece.raw[:num_bytes]
        return answer


def test_a_client_that_asks_for_new_keys_often_is_cut_off() -> None:
    async def test(server: Served) -> None:
        def run() -> None:
            usual = KeyUpdates(server.port)
            assert usual.update(32) == 32
            assert usual.ask(post("/echo", b"a")).startswith(b"HTTP/1.1 200")
            usual.update(1)
            flood = KeyUpdates(server.port)
            assert flood.update(300_000) < 300_000
            for client in (usual, flood):
                assert client.ask(post("/echo", b"a")) == b""
                client.socket.close()

        await asyncio.to_thread(run)
        await server.until_closed()

    check(test, options())


def test_connections_that_have_ended_are_forgotten() -> None:
    async def test(server: Served) -> None:
        for _ in range(5):
            assert (await server.ask(post("/echo", b"a"), trusting()))[2] == b"a"
        await server.until_closed()
        await asyncio.sleep(0.1)
        gc.collect()
        assert len(tls._asked) == 0

    check(test, options())
