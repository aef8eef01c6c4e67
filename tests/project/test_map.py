"""The repository keeps its shape: small files, imports that point downward, nothing that belongs to one machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fastgen
from fastgen.version import DISTRIBUTION, install_command

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 450
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh", ".txt", ".json", ".j2", ".h", ".cfg", ""}
SKIPPED = {".git", ".venv", ".venvs", ".hypothesis", "dist", "__pycache__", "unfinished"}


def run_python(code: str, *flags: str) -> str:
    """Returns what a fresh interpreter prints that runs ``code`` away from the checkout."""
    done = subprocess.run(
        [sys.executable, "-B", *flags, "-c", code], cwd="/", capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def repository_texts() -> list[Path]:
    paths = []
    for folder, folders, files in os.walk(ROOT):
        skips_all = "pyvenv.cfg" in files
        folders[:] = [n for n in folders if not (skips_all or n in SKIPPED or n.endswith("_cache"))]
        paths += [
            Path(folder, n) for n in files if not skips_all and n not in SKIPPED and Path(n).suffix in TEXT_SUFFIXES
        ]
    return paths


def test_files_are_small() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / "fastgen").rglob("*.py")
    }
    assert len(lengths) > 10
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "fastgen").rglob("*.py")
        if path.stat().st_size and not path.read_text().startswith(('"""', 'r"""'))
    ]
    assert silent == []


def test_imports_follow_the_map() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = re.search(r"Contracts: (\d+) kept, 0 broken", done.stdout)
    assert kept is not None, done.stdout
    assert int(kept[1]) >= 3


def test_importing_fastgen_loads_nothing_heavy_and_opens_nothing() -> None:
    code = """
import json, sys
opened = []
def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and not arguments[0].endswith((".py", ".pyc")):
        opened.append(arguments[0])
    if event.startswith(("socket.", "subprocess.", "os.system", "os.mkdir")):
        opened.append(event)
sys.addaudithook(audit)
import fastgen
heavy = {"torch", "transformers", "numpy", "pydantic", "triton", "huggingface_hub", "typer", "rich"}
print(json.dumps([opened, sorted(heavy & set(sys.modules))]))
"""
    assert json.loads(run_python(code)) == [[], []]


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
sys.argv = ["fastgen", "--help"]
from fastgen.cli import main
try:
    main()
except SystemExit as stop:
    assert stop.code == 0
print(sorted({"torch", "transformers", "triton", "huggingface_hub", "safetensors"} & set(sys.modules)))
"""
    out = run_python(code)
    assert out.endswith("\n[]\n")
    for command in ("generate", "chat", "info", "recipe"):
        assert f"\n  {command} " in out


def test_every_public_name_resolves_when_asked_for() -> None:
    code = """
import fastgen
before = set(vars(fastgen))
listed = set(dir(fastgen))
values = {name: getattr(fastgen, name) for name in fastgen.__all__}
assert listed >= set(fastgen.__all__), listed
assert not before & set(fastgen.__all__), before
assert all(vars(fastgen)[name] is value for name, value in values.items())
print(fastgen.__version__)
"""
    assert run_python(code).strip() == fastgen.__version__


@pytest.mark.slow
def test_the_source_runs_where_nothing_is_installed() -> None:
    code = f"""
import sys
from importlib import metadata
sys.path.insert(0, {str(ROOT)!r})
distribution = metadata.distribution
def without_fastgen(name):
    if name.startswith("fastgen"):
        raise metadata.PackageNotFoundError(name)
    return distribution(name)
metadata.distribution = without_fastgen
import fastgen
with fastgen.load("tiny-llama") as llm:
    llm.generate("a", max_new_tokens=1)
    print(llm.recording().header.fastgen)
"""
    assert run_python(code).strip() == fastgen.__version__


def test_the_distribution_is_named_right_everywhere() -> None:
    """``pip install fastgen`` installs another project, and so does ``fastgen[extra]``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION != "fastgen"
    assert re.findall(r"'(.*)\[(.*)\]'", install_command("serve")) == [(DISTRIBUTION, "serve")]
    name = r"(?<![\w./-])fastgen(?![\w/.-])"
    wrong = re.compile(rf"{name}\[[a-z]|\b(?:pip|uv|pipx)\b.* (?:add|install)\b[^#\n]*{name}|{name} ?[=~>]=")
    known = set(project["optional-dependencies"])
    found, unknown = {}, set()
    for path in repository_texts():
        text = path.read_text(encoding="utf-8", errors="replace")
        if path != Path(__file__).resolve() and (hits := [hit[0] for hit in wrong.finditer(text)]):
            found[str(path.relative_to(ROOT))] = hits
        unknown |= set(re.findall(rf"{DISTRIBUTION}\[([a-z]+)\]", text)) - known
    assert found == {}
    assert unknown == set()


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'fastgen' has no attribute 'lode'"):
        fastgen.lode  # noqa: B018


@pytest.mark.parametrize("module", ["fastgen", "fastgen.errors", "fastgen.cli"])
def test_imports_without_a_warning(module: str) -> None:
    run_python(f"import {module}", "-W", "error")


def test_no_file_knows_this_machine() -> None:
    places = {str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix} - {"/", "/usr", "/usr/local"}
    pattern = re.compile(
        "|".join(rf"(?<![\w/]){re.escape(place)}(?![\w-])" for place in places) + r"|/(?:home|Users)/\w+/"
    )
    found = {}
    for path in repository_texts():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        hits = [line.strip() for line in lines if pattern.search(line)]
        if hits and path != Path(__file__).resolve():
            found[str(path.relative_to(ROOT))] = hits
    assert found == {}


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.split("\n", 3)[1].strip() == "Apache License"
    headings = re.findall(r"^   (\d)\. ", text, re.MULTILINE)
    assert headings == list("123456789")
    assert "APPENDIX: How to apply the Apache License to your work." in text
