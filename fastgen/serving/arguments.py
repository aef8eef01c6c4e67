"""The arguments of :func:`fastgen.serve`, one flat list as users give them, sorted into loading and serving."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastgen.arguments import arguments_of, build
from fastgen.errors import InvalidArgumentError
from fastgen.options import LoadOptions
from fastgen.other_servers import argument_hint
from fastgen.serving.api_keys import ApiKeys
from fastgen.serving.options import ServeOptions

_LOAD = frozenset(argument.name for argument in arguments_of(LoadOptions))
_SERVE = frozenset(argument.name for argument in arguments_of(ServeOptions))


def sort_arguments(given: Mapping[str, Any], *, reads_keys: bool = True) -> tuple[dict[str, Any], ServeOptions]:
    """Returns the arguments of ``fastgen.load`` among ``given``, and the others as one value.

    API keys are read here: from ``api_key_file``, and from the environment. Without ``reads_keys`` there are none, such
    as on a machine that does not serve. Raises ``InvalidArgumentError``.
    """
    check_names(given)
    load_arguments = {name: value for name, value in given.items() if name in _LOAD}
    if "itl_target" in given:  # the policy keeps it, and admission refuses what would break it
        load_arguments["itl_target_ms"] = given["itl_target"]
    keys = ApiKeys.load(given.get("api_key_file"), os.environ) if reads_keys else ApiKeys()
    return load_arguments, build(ServeOptions, given, api_keys=keys)


def check_names(given: Mapping[str, Any]) -> None:
    """Raises ``InvalidArgumentError`` for a name that is no argument."""
    for name in given:
        if name not in _LOAD and name not in _SERVE:
            advice = argument_hint(name, [*_LOAD, *_SERVE])
            what = f"{name!r} is neither an argument of fastgen.load nor one of serving"
            raise InvalidArgumentError(f"{what}. {advice}" if advice else what)
