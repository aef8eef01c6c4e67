"""Flags that several commands share. They come from the dataclasses that state the arguments: the arguments of
``fastgen.load`` and ``fastgen.serve``, and the fields of ``SamplingParams``.

A command gets the arguments that its command line names, and passes them on. An argument that is not given is not
passed, so that defaults are stated in one place only.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Annotated, Any, NoReturn, TextIO

import typer

import fastgen
from fastgen.arguments import Argument, arguments_of
from fastgen.errors import FastgenError, InvalidArgumentError, KernelError, OutOfMemoryError
from fastgen.options import LoadOptions
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.options import ServeOptions

# The model is an argument of the command line and no flag.
_MODEL, *LOAD_ARGUMENTS = arguments_of(LoadOptions)
SERVE_ARGUMENTS = arguments_of(ServeOptions)
SAMPLING_ARGUMENTS = arguments_of(SamplingParams)

# The arguments that a command line names, and their values.
Given = dict[str, Any]
MODEL_HELP = _MODEL.option.help
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]

_FLAGS = {argument.name: argument.flag for argument in (*LOAD_ARGUMENTS, *SERVE_ARGUMENTS)}
_FLAGS["this_config"] = "--this-config"  # of `fastgen.verify`
# Messages are searched for all names but these two, which are ordinary words.
_NAMES = "|".join(name for name in _FLAGS if name not in ("host", "name"))
_ARGUMENT = re.compile(rf"(?<![\w./'\"`-])({_NAMES})\b(=?)(?=(\S?))")


def only(arguments: Iterable[Argument], *names: str) -> list[Argument]:
    """Returns the arguments with these names, in the order of the names."""
    by_name = {argument.name: argument for argument in arguments}
    return [by_name[name] for name in names]


def without(arguments: Iterable[Argument], *names: str) -> list[Argument]:
    """Returns the arguments with other names than these."""
    return [argument for argument in arguments if argument.name not in names]


def with_flags(**groups: Iterable[Argument]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the flags of each group of arguments, in place of the parameter of that name.

    The parameter gets the arguments of the group that the command line names, as a dict.
    """
    arguments = {name: list(group) for name, group in groups.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name in arguments:
                parameters += (flag for argument in arguments[parameter.name] for flag in _flags(argument))
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @wraps(command)
        def run(**values: Any) -> None:
            given = {name: _given(group, values) for name, group in arguments.items()}
            command(**values, **given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _flags(argument: Argument) -> list[inspect.Parameter]:
    """Returns the parameters by which typer reads ``argument``; each is ``None`` where the flag is not given."""
    option, kind, name = argument.option, argument.flag_type, argument.flag
    default = f" Default: {argument.default_text}."
    spellings = [f"{name}/--no-{name[2:]}" if kind is bool and argument.default is True else name]
    if option.short_flag is not None:
        spellings.append(option.short_flag)
    shown = f"{option.help} {option.flag_help}".rstrip()
    flags = [_flag(argument.name, kind, typer.Option(*spellings, metavar=option.metavar, help=shown + default))]
    if (second := option.second_flag) is not None:
        read = typer.Option(second.name, metavar=second.metavar, help=second.help)
        flags.append(_flag(second.name.removeprefix("--"), second.type, read))
    return flags


def _flag(name: str, kind: Any, read: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, read]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _given(arguments: Iterable[Argument], values: dict[str, Any]) -> Given:
    """Takes the values of ``arguments`` out of ``values`` and returns those that were given; a second flag wins."""
    given = {}
    for argument in arguments:
        second = argument.option.second_flag
        for flag in (argument.name, *([] if second is None else [second.name.removeprefix("--")])):
            value = values.pop(flag)
            if value not in (None, [], ()):
                given[argument.name] = value
    return given


def sampling_fields(given: Given) -> Given:
    """Parses the fields of ``SamplingParams`` that are texts on the command line. Checks all fields, so that errors
    come before a model is loaded.
    """
    fields = dict(given)
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(_parse_bias(text) for text in fields["logit_bias"])
    if "response_format" in fields:
        fields["response_format"] = _parse_json("--response-format", fields["response_format"])
    if fields.get("early_stopping") in ("true", "false"):
        fields["early_stopping"] = fields["early_stopping"] == "true"
    fastgen.SamplingParams(**fields)
    return fields


def in_flags(error: FastgenError | str) -> str:
    """Returns the message of ``error``, which may be a finding's text, with the arguments of ``fastgen.load`` and
    ``fastgen.serve`` in it (``dtype='int3'``) as flags (``--dtype 'int3'``).

    A bare name is replaced only in an error about arguments; in other errors it may be a key of a file. A kernel's
    error has the kernel's parameters, which are no flags.
    """
    if isinstance(error, KernelError):
        return str(error)
    about_arguments = isinstance(error, InvalidArgumentError | OutOfMemoryError)

    def flag(found: re.Match[str]) -> str:
        name, equals, following = found.groups()
        if not equals and not (about_arguments and "_" in name):
            return found[0]
        gap = " " if following.isalnum() or following in ("'", '"', "-", "[") else ""
        return f"{_FLAGS[name]}{gap if equals else ''}"

    return _ARGUMENT.sub(flag, str(error))


def usage_error(message: str) -> NoReturn:
    """Ends the command with ``message`` and exit status 2."""
    raise typer.BadParameter(message)


def stdin() -> TextIO:
    """Returns standard input. Raises :class:`InvalidArgumentError` where it is closed."""
    if sys.stdin is None:
        raise InvalidArgumentError("standard input is closed, so there is nothing to read")
    return sys.stdin


def check_text(text: str) -> str:
    """Returns ``text``, unless it came from bytes that are not UTF-8."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        usage_error("a prompt is not UTF-8 text")
    return text


def _parse_json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        usage_error(f"{flag} is not JSON: {error}")


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        usage_error(f"--logit-bias {text}: expected ID=BIAS, such as 17=-100")
