"""The means to state arguments once, for Python, the command line, properties files and docs.

A dataclass states arguments: each field has a name, a type and a default, and in ``Annotated`` an :class:`Option`,
which holds what else users need to know. From these come the signature and the checks in Python, the flags of the
command line, the keys of a properties file and the tables in ``docs``. This module imports nothing heavy.

Modules with such dataclasses do not postpone annotations (``from __future__ import annotations``): the types of fields
are needed at run time. A type that is heavy to import is written in quotes.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from typing import Any, ForwardRef, ParamSpec, TypeVar, get_args, get_origin

from fastgen.errors import InvalidArgumentError
from fastgen.other_servers import argument_hint

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}iB": 1024**_power}


@dataclass(frozen=True)
class Check:
    """A condition that the value of an argument must meet."""

    # Completes the sentence "NAME=VALUE: expected …".
    expected: str
    accepts: Callable[[Any], bool]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


AT_LEAST_1 = Check("an integer of at least 1", lambda value: _is_integer(value) and value >= 1)
WHOLE_FROM_0 = Check("an integer of at least 0", lambda value: _is_integer(value) and value >= 0)
AT_LEAST_0 = Check("a number of at least 0", lambda value: _is_number(value) and value >= 0)
ABOVE_0 = Check("a number above 0", lambda value: _is_number(value) and value > 0)
SECONDS = Check("a number of seconds above 0", ABOVE_0.accepts)
TRUE_OR_FALSE = Check("True or False", lambda value: isinstance(value, bool))
PORT = Check("a port, 1 to 65535, or 0 for any that is free", lambda value: _is_integer(value) and 0 <= value <= 65535)


@dataclass(frozen=True)
class Flag:
    """A second flag of the command line for the same argument, with a type of its own."""

    name: str
    type: type
    help: str
    metavar: str | None = None


@dataclass(frozen=True)
class Option:
    """The description of one argument, beside its name, type and default."""

    # One sentence, for ``--help`` and for the tables in ``docs``.
    help: str
    # What else there is to know, for the tables and for ``help(fastgen.load)``.
    details: str = ""
    check: Check | None = None
    # The default in words, where its value does not say enough.
    default: str = ""
    # The name of the argument, and the type of the value that users give, where they are not the field's.
    name: str | None = None
    type: Any = None
    # What only users of the command line need to know: one sentence.
    flag_help: str = ""
    # The flag, where it is not the argument's name in kebab case.
    flag: str | None = None
    # A one-letter flag for the same.
    short_flag: str | None = None
    # What stands for the flag's value in ``--help``, where its type does not say enough.
    metavar: str | None = None
    # The type of the flag's value, where the argument's type leaves that open.
    flag_type: type | None = None
    second_flag: Flag | None = None
    # The key of LMI's ``serving.properties`` that stands for this argument.
    lmi_key: str | None = None
    # Turns the value that users give into the one that is kept.
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Argument:
    """An argument as users give it: a field of a dataclass and its :class:`Option`."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def flag(self) -> str:
        return self.option.flag or "--" + self.name.replace("_", "-")

    @property
    def flag_type(self) -> Any:
        """The type of the flag's value: ``bool``, ``int``, ``float``, ``str``, or a list of one of these."""
        if self.option.flag_type is not None:
            return self.option.flag_type
        kinds = [kind for kind in get_args(self.type) or (self.type,) if kind is not type(None)]
        if get_origin(self.type) in (tuple, Sequence):
            return list[get_args(self.type)[0]]  # type: ignore[misc]
        return next((kind for kind in (str, float, int, bool) if kind in kinds), str)

    @property
    def default_text(self) -> str:
        """The default in words."""
        if self.is_required:
            return "required"
        if self.option.default:
            return self.option.default
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.default is None or self.default == ():
            return "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def summary(self) -> str:
        """Returns its description in sentences."""
        default = "" if self.is_required else f"Default: {self.default_text}."
        return " ".join(part for part in (self.option.help, self.option.details, default) if part)


def arguments_of(kind: type) -> list[Argument]:
    """Returns the arguments that the dataclass ``kind`` states, those of the dataclasses inside it included."""
    found = []
    for field, option in _stated(kind):
        if option is None:
            found += arguments_of(field.type)  # type: ignore[arg-type]
            continue
        default = field.default
        if default is MISSING:
            default = inspect.Parameter.empty if field.default_factory is MISSING else None
        found.append(Argument(option.name or field.name, option.type or get_args(field.type)[0], default, option))
    return found


def check(options: object) -> None:
    """Raises :class:`InvalidArgumentError` for the first field of ``options`` whose value its option does not take."""
    for field, option in _stated(type(options)):
        value = getattr(options, field.name)
        is_left_out = value is None and field.default is None
        if option is not None and option.check is not None and not is_left_out and not option.check.accepts(value):
            raise InvalidArgumentError(f"{option.name or field.name}={value!r}: expected {option.check.expected}")


def build(kind: Callable[..., T], given: Mapping[str, Any], **made: Any) -> T:
    """Returns a ``kind`` of the arguments in ``given``, with the dataclasses inside it; ``made`` are fields of it that
    the caller has made. Arguments of other kinds are passed over.
    """
    values = dict(made)
    for field, option in _stated(kind):  # type: ignore[arg-type]
        if field.name in made:
            continue
        if option is None:
            values[field.name] = build(field.type, given)  # type: ignore[arg-type]
        elif (name := option.name or field.name) in given:
            value = given[name]
            values[field.name] = value if value is None or option.convert is None else option.convert(value)
    return kind(**values)


def takes(kind: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Makes of a function of a ``kind`` one of the arguments of ``kind``, which its signature and docstring then list.

    Type checkers and editors see the arguments as those of the dataclass.
    """

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}{_nearest(signature.parameters, kwargs)}") from None
            return function(kind(*args, **kwargs))

        call.__annotations__ = {"return": function.__annotations__["return"]}
        show_arguments(call, kind)  # type: ignore[arg-type]
        signature = inspect.signature(call)
        return call

    return decorate


def show_arguments(function: Callable[..., Any], *kinds: type) -> None:
    """Has the signature and the docstring of ``function`` list the arguments of ``kinds``, after its own parameters."""
    arguments = [argument for kind in kinds for argument in arguments_of(kind)]
    own = inspect.signature(function, follow_wrapped=False).parameters.values()
    parameters = [
        one for one in own if one.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    parameters += [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if argument.is_required else inspect.Parameter.KEYWORD_ONLY,
            default=argument.default,
            annotation=argument.type.__forward_arg__ if isinstance(argument.type, ForwardRef) else argument.type,
        )
        for argument in arguments
        if argument.name not in {one.name for one in own}
    ]
    lines = [f"``{one.name}``: {one.summary}" for one in arguments]
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters, return_annotation=function.__annotations__["return"]
    )
    function.__annotations__ |= {one.name: one.annotation for one in parameters}
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", *lines])


def _nearest(known: Mapping[str, object], given: Mapping[str, object]) -> str:
    """Returns a hint for the first name in ``given`` that is not ``known``."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None and (advice := argument_hint(unknown, known)):
        return f". {advice}"
    near = difflib.get_close_matches(unknown, known, n=1) if unknown is not None else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _stated(kind: type) -> Iterator[tuple[Field[Any], Option | None]]:
    """Yields the fields of ``kind`` that state an argument, and those that are dataclasses, without an option."""
    for field in fields(kind):
        if isinstance(field.type, type) and is_dataclass(field.type):
            yield field, None
        for option in get_args(field.type)[1:]:
            if isinstance(option, Option):
                yield field, option


def parse_bytes(size: int | str, name: str) -> int:
    """Returns bytes from a number, or a string such as ``"4GiB"`` or ``"500 MB"``; ``name`` is the argument's name."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?i?B|)", size.strip()) if isinstance(size, str) else None
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise InvalidArgumentError(f"{name}={size!r}: expected a positive number of bytes or a size such as '4GiB'")
    return int(float(match[1]) * _UNITS[match[2]])


def shown_bytes(size_bytes: float) -> str:
    """Writes a size for people: in GiB with two decimals, or in MiB with four digits if it is small."""
    return f"{size_bytes / 2**30:,.2f} GiB" if size_bytes >= 2**30 / 10 else f"{size_bytes / 2**20:.4g} MiB"
