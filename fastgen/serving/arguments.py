"""The arguments of ``fastgen.serve``, one flat list as people give them, sorted into what they are about."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastgen.errors import InvalidArgumentError
from fastgen.serving.admission.admission import Limits
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.options import ConnectionLimits, ServeOptions, parse_log_format

_PARTS = ("limits", "connections", "api_keys")  # of ServeOptions, given by their own fields
_LIMITS = tuple(field.name for field in fields(Limits) if field.name != "itl_target_ms")
_CONNECTIONS = tuple(field.name for field in fields(ConnectionLimits))
_OWN = tuple(field.name for field in fields(ServeOptions) if field.name not in _PARTS)
# All but those of ``fastgen.load``. ``itl_target``, in milliseconds, is ``load``'s ``itl_target_ms`` and a limit.
SERVE_ARGUMENTS = (*_OWN, "api_key_file", *_LIMITS, "itl_target", *_CONNECTIONS)


def sort_arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], ServeOptions]:
    """The arguments of ``fastgen.load`` among ``given``, and all others as one value.

    Keys are read here: from ``api_key_file``, and from the environment. Raises ``InvalidArgumentError``.
    """

    def take(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: given[name] for name in names if name in given}

    load_arguments = {name: value for name, value in given.items() if name not in SERVE_ARGUMENTS}
    limits, own = take(_LIMITS), take(_OWN)
    if "itl_target" in given:
        limits["itl_target_ms"] = load_arguments["itl_target_ms"] = given["itl_target"]
    for name in ("tls_cert", "tls_key"):
        if own.get(name) is not None:
            own[name] = Path(own[name])
    if "allow_origins" in own:
        own["allow_origins"] = tuple(own["allow_origins"])
    if "log_format" in own:
        own["log_format"] = parse_log_format(own["log_format"])
    options = ServeOptions(
        limits=Limits(**limits),
        connections=ConnectionLimits(**take(_CONNECTIONS)),
        api_keys=ApiKeys.load(given.get("api_key_file"), os.environ),
        **own,
    )
    return load_arguments, options


def check_names(given: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgumentError`` for a name that is no argument at all."""
    from inspect import signature

    from fastgen.runtime.loading import load

    for name in given:
        if name not in SERVE_ARGUMENTS and name not in signature(load).parameters:
            raise InvalidArgumentError(f"{name!r} is neither an argument of fastgen.load nor one of serving")
