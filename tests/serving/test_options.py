"""The arguments of serving: what holds without any, what cannot be together, and which are those of loading."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.serving.arguments import sort_arguments
from fastgen.serving.options import ConnectionLimits, Limits, ServeOptions
from fastgen.serving.refusals import UnauthorizedError


def test_the_defaults_are_those_of_the_docs() -> None:
    assert vars(Limits()) == {
        "max_queued_requests": 1024,
        "max_queued_tokens": 1_048_576,
        "max_prompt_tokens": None,
        "ttft_slo_s": None,
        "itl_target_ms": None,
    }
    assert vars(ConnectionLimits()) == {
        "max_connections": 1024,
        "max_body_bytes": 16_777_216,
        "header_timeout_s": 10.0,
        "body_timeout_s": 60.0,
        "write_timeout_s": 30.0,
        "keep_alive_s": 30.0,
    }
    found = dict(vars(ServeOptions()))
    assert not found.pop("api_keys")
    assert found == {
        "host": "127.0.0.1",
        "port": 8000,
        "grpc_port": None,
        "name": None,
        "tool_format": None,
        "limits": Limits(),
        "connections": ConnectionLimits(),
        "tls_cert": None,
        "tls_key": None,
        "allow_origins": (),
        "allow_hosts": (),
        "drain_timeout_s": 30.0,
        "engine_timeout_s": 60.0,
        "replicas": None,
        "address": None,
        "router": "prefix",
        "log_format": "text",
        "log_requests": False,
        "log_prompts": False,
    }


@pytest.mark.parametrize("kind", [Limits, ConnectionLimits, ServeOptions])
def test_options_are_given_by_their_names_and_stay_as_they_are(kind: Any) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        kind(7)
    found = kind()
    name = next(iter(vars(found)))
    with pytest.raises(FrozenInstanceError):
        setattr(found, name, 7)


PEM = Path("a.pem")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tool_format": "none"}, "tool_format='none'"),
        ({"tls_cert": PEM}, "tls_cert and tls_key go together"),
        ({"tls_key": PEM}, "tls_cert and tls_key go together"),
        ({"allow_origins": ("https://a", "https://a/")}, "allow_origins='https://a/'"),
        ({"allow_hosts": ("a", "a:1")}, "allow_hosts='a:1'"),
        ({"address": "auto"}, "address='auto': needs replicas"),
        ({"router": "random"}, "router='random': needs replicas"),
        ({"log_prompts": True}, "log_prompts needs log_requests"),
        ({"port": -1}, "port=-1"),
        ({"port": 65_536}, "port=65536"),
        ({"replicas": 0}, "replicas=0"),
        ({"drain_timeout_s": -0.5}, "drain_timeout_s=-0.5"),
        ({"engine_timeout_s": 0.0}, "engine_timeout_s=0.0"),
        ({"log_format": "xml"}, "log_format='xml'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        ServeOptions(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"tool_format": None},
        {"tls_cert": PEM, "tls_key": PEM},
        {"allow_origins": ("*", "null", "https://example.org", "http://localhost:3000")},
        {"allow_hosts": ("*", "models.example.org")},
        {"replicas": 1, "address": "auto", "router": "random"},
        {"replicas": 2},
        {"router": "prefix"},
        {"log_requests": True},
        {"log_requests": True, "log_prompts": True},
        {"port": 0, "grpc_port": 65_535},
        {"drain_timeout_s": 0.0},
    ],
    ids=str,
)
def test_what_can_be_is_taken(given: dict[str, Any]) -> None:
    found = ServeOptions(**given)
    assert {name: getattr(found, name) for name in given} == given


def test_arguments_are_those_of_loading_or_of_serving_and_a_target_is_one_of_both() -> None:
    load, options = sort_arguments({"model": "m", "port": 7, "max_num_seqs": 3, "max_queued_requests": 5})
    assert load == {"model": "m", "max_num_seqs": 3}
    assert (options.port, options.limits.max_queued_requests, options.limits.itl_target_ms) == (7, 5, None)
    load, options = sort_arguments({"model": "m", "itl_target": 25.0})
    assert load == {"model": "m", "itl_target_ms": 25.0}
    assert options.limits.itl_target_ms == 25.0
    with pytest.raises(InvalidArgumentError, match="'prot' is neither"):
        sort_arguments({"model": "m", "prot": 7})


def test_keys_are_read_from_the_file_and_the_environment_unless_it_is_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("of-the-file\n")
    monkeypatch.setenv("FASTGEN_API_KEY", "of-the-environment")
    given = {"model": "m", "api_key_file": file}
    keys = sort_arguments(given)[1].api_keys
    for key in ("of-the-file", "of-the-environment"):
        keys.check(key)
    with pytest.raises(UnauthorizedError):
        keys.check("another")
    assert not sort_arguments(given, reads_keys=False)[1].api_keys
