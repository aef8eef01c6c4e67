"""Reads docs/recipes.md as its reader does: writes the files it shows, types its commands, notes what is printed.

What a fenced block is, its first line says:

- `json a/b.json`, and so with `yaml`, `python` and `toml`: a file of that name with this content;
- `yaml x.yaml +`: more lines at the end of that file;
- `diff x.yaml`: an edit; what the file has without the lines of `+` becomes what is left without the lines of `-`;
- `yaml from llama`: lines of the shipped recipe of that name, indented less perhaps;
- `console`: commands after `$`, each with all that it prints; the exit status is 0, or N with `# exit status N`.

What is printed must be what is shown, but for blanks at the ends of lines, and for numbers such as 2.1e+00, which may
be ten times larger or smaller on another machine. A line `⋮` stands for any lines, or none, and `⋮` in a line for
any part of it.

`python -m tests.project.course` puts what is printed now into the page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from fastgen.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "recipes.md"
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_SCIENTIFIC = re.compile(r"\d\.\de[+-]\d\d")
_ELIDED = "⋮"
_INSTALLED = "installed"  # in the reader's directory: what `pip` installs goes there, not into this environment


class TextError(AssertionError):
    """The text asks for something that cannot be done."""


@dataclass(frozen=True)
class Printed:
    """The result of a command: its exit status and all that it printed, without blanks at the ends of lines."""

    status: int
    text: str


def followed(text: str, directory: Path) -> str:
    """Do all that ``text`` says in ``directory``; returns it with what was printed where it shows something else."""

    def block(found: re.Match[str]) -> str:
        language, words, content = found[1], found[2].split(), found[3]
        line = text[: found.start()].count("\n") + 1
        if language == "console":
            return found[0].replace(content, _COMMAND.sub(lambda each: _typed(each, directory), content))
        try:
            if words[:1] == ["from"]:
                _find_quoted(content, words[1])
            elif words:
                _write(language, words, content, directory)
        except TextError as wrong:
            raise TextError(f"line {line}: {wrong}") from None
        return found[0]

    return _BLOCK.sub(block, text)


def _typed(found: re.Match[str], directory: Path) -> str:
    command, _, comment = found[1].partition("  #")
    expected = re.search(r"exit status (\d+)", comment)
    printed = run(command.strip(), directory)
    if printed.status == int(expected[1] if expected else 0) and alike(found[2], printed.text):
        return found[0]
    status = f"   # exit status {printed.status}" if printed.status else ""
    return f"$ {command.strip()}{status}\n{printed.text}"


def alike(shown: str, printed: str) -> bool:
    """Returns whether ``printed`` is what ``shown`` says; see the top of this file."""
    pattern = "".join("(?:.*\n)*?" if line == _ELIDED else _pattern(line) for line in _stripped(shown).splitlines())
    found = re.fullmatch(pattern, _stripped(printed))
    if found is None:
        return False
    pairs = zip(_SCIENTIFIC.findall(shown), found.groups(), strict=True)
    return all(one == other or (_SCIENTIFIC.fullmatch(other) and _near(one, other)) for one, other in pairs)


def _pattern(line: str) -> str:
    """A regular expression for a line, with a group for each number in scientific notation."""
    pieces = ("([0-9.e+-]+)".join(map(re.escape, _SCIENTIFIC.split(piece))) for piece in line.split(_ELIDED))
    return ".*".join(pieces) + "\n"


def _near(one: str, other: str) -> bool:
    return 0.1 * float(other) <= float(one) <= 10 * float(other)


def _stripped(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    return lines + "\n" if lines else ""


def _write(language: str, words: list[str], content: str, directory: Path) -> None:
    name, *more = words
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if language == "diff":
        lines = content.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        before = file.read_text("utf-8")
        if before.count(old) != 1:
            raise TextError(f"{name} has these lines {before.count(old)} times:\n{old}")
        file.write_text(before.replace(old, new), "utf-8")
    elif more == ["+"]:
        file.write_text(file.read_text("utf-8") + content, "utf-8")
    elif more:
        raise TextError(f"what is meant by {' '.join(more)!r}?")
    else:
        file.write_text(content, "utf-8")


def _find_quoted(content: str, recipe: str) -> None:
    """The lines stand in the shipped recipe, deeper perhaps by some columns."""
    lines = (ROOT / "recipes" / f"{recipe}.yaml").read_text("utf-8").splitlines()
    wanted = dedent(content).splitlines()
    for start in range(len(lines) - len(wanted) + 1):
        if dedent("\n".join(lines[start : start + len(wanted)])).splitlines() == wanted:
            return
    raise TextError(f"recipes/{recipe}.yaml does not say\n{content}")


def run(line: str, directory: Path) -> Printed:
    """Type a command. ``fastgen`` and ``python FILE`` run in this process, for speed; others in one of their own."""
    words = shlex.split(line)
    settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program, *arguments = words[len(settings) :]
    if program == "fastgen":
        return _run_here(main, [program, *arguments], directory, settings)
    if program == "python":
        return _run_here(lambda: runpy.run_path(arguments[0], run_name="__main__"), arguments, directory, settings)
    pip = {"PIP_TARGET": str(directory / _INSTALLED), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [program, *arguments],
        cwd=directory,
        env={**os.environ, **pip, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PATH": path, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    return Printed(done.returncode, _stripped(done.stdout))


def _run_here(program: Callable[[], object], words: list[str], directory: Path, settings: dict[str, str]) -> Printed:
    status: object = 0
    printed = io.StringIO()
    before = set(sys.modules)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        patch.chdir(directory)
        patch.setattr(sys, "argv", words)
        patch.syspath_prepend(str(directory / _INSTALLED))
        patch.syspath_prepend(str(directory))
        patch.delenv("FASTGEN_RECIPES", raising=False)
        patch.setenv("COLUMNS", "80")
        for name, value in settings.items():
            patch.setenv(name, value)
        try:
            program()
        except SystemExit as stop:
            status = stop.code
        except Exception:
            traceback.print_exc()
            status = 1
    for name in set(sys.modules) - before:  # another reader's module of the same name lies elsewhere
        if str(directory) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
    return Printed(status if isinstance(status, int) else int(status is not None), _stripped(printed.getvalue()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(followed(PAGE.read_text("utf-8"), Path(scratch)), "utf-8")
