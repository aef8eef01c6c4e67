"""``fastgen serve``: what its flags, and a serving.properties, ask the server to be. The server itself is a stub."""

from __future__ import annotations

from io import TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import typer

from fastgen.cli import app, main, options
from fastgen.errors import InvalidArgumentError
from fastgen.serving import run as serving_run
from fastgen.serving.clients.deployments import registered, this_deployment
from fastgen.serving.options import ServeOptions
from fastgen.serving.refusals import UnauthorizedError
from tests.cli.conftest import Run


class Asked:
    """The arguments and options that the server was started with."""

    arguments: dict[str, Any]
    options: ServeOptions


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    kept = Asked()

    def run(arguments: dict[str, Any], options: ServeOptions) -> None:
        kept.arguments, kept.options = arguments, options

    monkeypatch.setattr(serving_run, "run", run)
    monkeypatch.delenv("FASTGEN_API_KEY", raising=False)
    return kept


def test_without_flags_all_is_the_default(run: Run, asked: Asked) -> None:
    assert run("serve", "tiny-llama").status == 0
    assert asked.arguments == {"model": "tiny-llama"}
    assert (asked.options.host, asked.options.port, asked.options.grpc_port) == ("127.0.0.1", 8000, None)
    assert not asked.options.api_keys


def test_flags_reach_what_they_are_about(run: Run, asked: Asked, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n# two\n")
    flags = (
        *("--host", "0.0.0.0", "--port", "0", "--grpc-port", "0", "--name", "stories", "--api-key-file", str(keys)),
        *("--max-num-seqs", "3", "--dtype", "float32", "--no-prefix-caching", "--allow-config-key", "a"),
        *("--max-queued-requests", "5", "--ttft-slo", "2.5", "--itl-target", "40", "--max-body-bytes", "1000"),
        *("--header-timeout", "1", "--keep-alive", "2", "--drain-timeout", "3", "--engine-timeout", "4"),
        *("--allow-origin", "https://a.example", "--allow-origin", "https://b.example", "--log-format", "json"),
        *("--log-requests", "--tool-format", "hermes"),
    )
    assert run("serve", "tiny-llama", *flags).status == 0
    assert asked.arguments == {
        "model": "tiny-llama",
        "max_num_seqs": 3,
        "dtype": "float32",
        "prefix_caching": False,
        "allow_config_keys": ["a"],
        "itl_target_ms": 40.0,
    }
    options = asked.options
    assert (options.host, options.port, options.grpc_port, options.name) == ("0.0.0.0", 0, 0, "stories")
    assert (options.limits.max_queued_requests, options.limits.ttft_slo_s, options.limits.itl_target_ms) == (5, 2.5, 40)
    assert (options.connections.max_body_bytes, options.connections.header_timeout_s) == (1000, 1)
    assert (options.connections.keep_alive_s, options.drain_timeout_s, options.engine_timeout_s) == (2, 3, 4)
    assert options.allow_origins == ("https://a.example", "https://b.example")
    assert (options.log_format, options.log_requests, options.log_prompts) == ("json", True, False)
    options.api_keys.check("one")
    with pytest.raises(UnauthorizedError):
        options.api_keys.check("two")


def test_properties_are_translated_and_flags_beside_them_win(run: Run, asked: Asked, tmp_path: Path) -> None:
    file = tmp_path / "serving.properties"
    file.write_text("option.model_id=tiny-opt\nbatch_size=4\nmax_batch_delay=20\njob_queue_size=9\noption.dtype=fp32\n")
    finished = run("serve", "--properties", str(file), "--dtype", "bfloat16")
    assert finished.status == 0
    assert asked.arguments == {
        "model": "tiny-opt",
        "policy": {"name": "dynamic", "batch_size": 4, "max_delay_s": 0.02},
        "max_num_seqs": 4,
        "dtype": "bfloat16",
    }
    assert asked.options.limits.max_queued_requests == 9
    assert f"{file}:4: job_queue_size: max_queued_requests=9" in finished.err.splitlines()
    assert run("serve", "tiny-llama", "--properties", str(file)).status == 0
    assert asked.arguments["model"] == "tiny-llama"


def test_properties_are_served_where_what_became_of_them_cannot_be_written(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serving.properties"
    file.write_text("option.model_id=tiny-opt\noption.dtype=fp32\n")
    monkeypatch.setattr("sys.argv", ["fastgen", "serve", "--properties", str(file)])
    with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", TextIOWrapper(full, write_through=True))
        with pytest.raises(SystemExit) as stop:
            main()
    assert stop.value.code == 0
    assert asked.arguments == {"model": "tiny-opt", "dtype": "float32"}


def test_a_model_is_needed(run: Run, asked: Asked, tmp_path: Path) -> None:
    assert run("serve").status == 2
    file = tmp_path / "serving.properties"
    file.write_text("engine=Python\n")
    finished = run("serve", "--properties", str(file))
    assert finished.status == 2
    assert "MODEL is missing" in finished.err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--tls-cert", "a.pem"), "go together"),
        (("--api-key-file", "/nowhere/keys"), "cannot read the API keys in /nowhere/keys"),
        (("--properties", "/nowhere/it"), "/nowhere/it: cannot be read"),
        (("--log-format", "xml"), "--log-format 'xml': expected 'text' or 'json'"),
        (("--tls-key", "a.pem"), "--tls-cert and --tls-key go together"),
        (("--ttft-slo", "-1"), "--ttft-slo -1.0: expected a number above 0"),
        (("--header-timeout", "0"), "--header-timeout 0.0: expected"),
        (("--port", "70000"), "--port 70000: expected a port"),
        (("--tool-format", "none"), "--tool-format 'none' is not one of"),
        (
            ("--stop", "nothing"),
            "'nothing' is not served on this machine; nothing is. `fastgen serve --list` lists the servers",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    run: Run, asked: Asked, flags: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FASTGEN_DEPLOYMENTS", str(tmp_path))
    finished = run("serve", "tiny-llama", *flags)
    assert finished.status == 1
    assert why in finished.err


def test_what_is_served_is_listed(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTGEN_DEPLOYMENTS", str(tmp_path))
    assert run("serve", "--list").out == ""
    this = this_deployment(
        name="stories",
        model="tiny-llama",
        address="http://127.0.0.1:1",
        grpc_address="127.0.0.1:2",
        certificate=None,
        token="secret",
    )
    with registered(this):
        listed = run("serve", "--list")
    assert listed.out == f"stories  http://127.0.0.1:1  gRPC 127.0.0.1:2  process {this.pid}\n"


def test_errors_name_every_argument_of_serving_by_its_flag() -> None:
    flags = {parameter.opts[0] for parameter in typer.main.get_command(app).commands["serve"].params}
    for argument in options.SERVE_ARGUMENTS:
        assert argument.flag in flags
        if argument.name not in ("host", "name"):  # no error is about these
            message = options.in_flags(InvalidArgumentError(f"{argument.name}=1: expected something else"))
            assert message == f"{argument.flag} 1: expected something else"
