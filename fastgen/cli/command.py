"""Commands with plain help: whole sentences, a default for every flag, and hints for flags of other servers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperCommand

from fastgen.other_servers import hint

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SENTENCE: Final = re.compile(r".+?\.(?=\s|$)", re.DOTALL)


class App(typer.Typer):
    """A group of commands, each a :class:`Command`."""

    def __init__(self, **settings: Any):
        super().__init__(no_args_is_help=True, add_completion=False, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(name, cls=Command, **settings)


class Command(TyperCommand):
    """A command of the command line."""

    def __init__(self, name: str | None, **settings: Any):
        super().__init__(name, **settings)
        flags: list[Any] = [parameter for parameter in self.params if _lacks_default(parameter)]
        for flag in flags:
            flag.help = f"{flag.help or ''} Default: {'off' if flag.is_flag else 'none'}.".lstrip()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the arguments. Says what to use in place of a flag that another server has and this command has not."""
        own = {spelling for parameter in self.params for spelling in (*parameter.opts, *parameter.secondary_opts)}
        given = [each.partition("=")[0] for each in args]
        try:
            return list(super().parse_args(ctx, args))
        except Exception as error:  # its class is click's, or that of the copy of click in newer versions of typer
            unknown = getattr(error, "option_name", None)  # of ``-abc`` it is ``-a``
            for flag in given:
                if unknown and flag.startswith(unknown) and (advice := hint(flag, own)):
                    raise typer.BadParameter(f"there is no flag {flag}. {advice}", ctx=ctx) from None
            raise

    def get_short_help_str(self, limit: int = 45) -> str:
        """Returns the first sentence of the help, however long: a cut one says too little."""
        text = " ".join((self.short_help or self.help or "").split())
        found = _SENTENCE.match(text)
        return found[0] if found else text


def _lacks_default(parameter: Any) -> bool:
    """Returns whether ``parameter`` is a flag that may be left out, and neither its help nor typer shows a default."""
    is_flag = parameter.param_type_name == "option" and not parameter.required
    return is_flag and not parameter.default and "Default:" not in (parameter.help or "")
