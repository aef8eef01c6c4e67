"""Checks that the JSON files of a tokenizer lead to no files but the checkpoint's own.

transformers passes what these files say to the tokenizer's class, and some arguments of these classes are files to
read. With ``"vocab": "/etc/passwd"`` clients would get the lines of that file as the texts of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastgen.errors import CheckpointError
from fastgen.models.checkpoint.files import read_json_object

# Keys whose value is the place of a file, wherever a class of transformers has such an argument.
_PLACE = re.compile(r"vocab|merges|rewriting_rules|(.*_)?(file|path|dir|spm)")
# Keys of tokenizer_config.json that often have a place of another machine. transformers uses the files of the
# checkpoint's directory instead.
_REPLACED = frozenset(
    {
        "added_tokens_file",
        "chat_template_file",
        "name_or_path",
        "special_tokens_map_file",
        "tokenizer_config_file",
        "tokenizer_file",
    }
)
# Keys of special_tokens_map.json. transformers takes any other for an argument of the class, too.
_TOKENS = re.compile(r".*_tokens?")


def check_tokenizer_files(directory: Path) -> None:
    """Raises :class:`CheckpointError` if ``tokenizer_config.json`` or ``special_tokens_map.json`` in ``directory`` may
    make transformers read a file that is not the checkpoint's.
    """
    config, tokens = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    if config.is_file():
        _check_config(config)
    if tokens.is_file():
        for key in read_json_object(tokens):
            if not _TOKENS.fullmatch(key):
                raise CheckpointError(
                    f"{tokens}: {key!r} is not the name of special tokens, which end in '_token' or '_tokens'; take it "
                    "out"
                )


def _check_config(file: Path) -> None:
    config = read_json_object(file)
    if config.get("init_inputs"):
        raise _refusal(file, "init_inputs", "may name files: they are arguments without a name")
    names = config.get("fast_tokenizer_files")
    if isinstance(names, list) and any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise _refusal(file, "fast_tokenizer_files", "names files of other directories")
    for place, key, value in _members(config):
        if place not in _REPLACED and _PLACE.fullmatch(key) and isinstance(value, (str, int, float)):
            raise _refusal(file, place, f"names a file, {value!r:.200}")


def _refusal(file: Path, place: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {place!r} {why}. Only the files in the checkpoint's directory are read, by their usual names; take "
        "the key out"
    )


def _members(config: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields the members of the objects anywhere in ``config``: the place with dots, the key, and the value."""
    stack: list[tuple[str, Any]] = [("", config)]
    while stack:
        place, value = stack.pop()
        if isinstance(value, list):
            stack += [(place, item) for item in value]
        elif isinstance(value, dict):
            for key, member in value.items():
                inner = f"{place}.{key}" if place else key
                yield inner, key, member
                stack.append((inner, member))
