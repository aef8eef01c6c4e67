"""Reads a recipe file: YAML into a :class:`~fastgen.models.recipe.tree.Tree`.

The file is read event by event, so depth and size are bounded before anything is built. The scalars are those of YAML's
core schema (null, true, false, integers, floats; everything else is text), so ``yes`` and ``1:30`` mean what they look
like. Tags are refused, no object is ever constructed, and a mapping holds each key once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

import yaml

from fastgen.errors import RecipeError
from fastgen.models.recipe.spelling import quoted, shown
from fastgen.models.recipe.tree import NodePath, Scalar, Tree, mapping

MAX_SIZE_BYTES: Final = 64 * 1024
MAX_DEPTH: Final = 24
MAX_NODES: Final = 10_000
MAX_KEY: Final = 200


def read_recipe_yaml(file: Path) -> Tree:
    """Returns the tree of the YAML in ``file``. Raises :class:`RecipeError`."""
    return parse_recipe_yaml(read_text(file), str(file))


def read_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_SIZE_BYTES + 1)  # one byte more than allowed shows that it is too large
            size_bytes = max(len(content), os.fstat(stream.fileno()).st_size)
        check_size(size_bytes, str(file))
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8 text: {error.reason} at byte {error.start}"
        raise RecipeError(message, file=str(file), line=line) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise RecipeError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}", file=ascii(str(file))[1:-1]
        ) from None


def check_size(size_bytes: int, file: str) -> None:
    if size_bytes > MAX_SIZE_BYTES:
        raise RecipeError(f"is too large: {size_bytes:,} bytes, at most {MAX_SIZE_BYTES:,}", file=file)


@lru_cache(maxsize=256)  # a file is read again for each recipe that extends it, and for each look-up by name
def parse_recipe_yaml(text: str, file: str) -> Tree:
    """Returns the tree of one YAML document whose root is a mapping. Raises :class:`RecipeError`."""
    check_size(len(text.encode("utf-8", "surrogatepass")), file)
    reader = None
    try:
        reader = _Reader(text, file)
        root = reader.document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(f"not valid YAML: {message}", file=file, line=mark.line + 1 if mark else None) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"the character {chr(error.character)!a} is not allowed"
        raise RecipeError(f"not valid YAML: {what}", file=file, line=line) from None
    except (ValueError, OverflowError) as error:  # PyYAML's chr() on "\UFFFFFFFF"
        raise RecipeError(f"not valid YAML: {error}", file=file, line=reader.line if reader else 1) from None
    if not isinstance(root.value, Mapping):
        raise RecipeError("a recipe is a mapping of keys to values", file=file, line=root.line)
    return root


# Plain scalars of YAML 1.2's core schema, less its octal and hexadecimal integers.
_NULL: Final = re.compile(r"|~|null|Null|NULL")
_TRUE: Final = re.compile(r"true|True|TRUE")
_FALSE: Final = re.compile(r"false|False|FALSE")
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,30}")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


class _Reader:
    """Builds trees from PyYAML's events."""

    def __init__(self, text: str, file: str):
        self.loader = yaml.SafeLoader(text)
        self.events: Iterator[yaml.Event] = iter(self.loader.get_event, None)
        self.file = file
        self.anchors: dict[str, Tree] = {}

    @property
    def line(self) -> int:
        """Returns the line that was read last, from 1."""
        return int(self.loader.line) + 1

    def document(self) -> Tree:
        next(self.events)  # the stream's start
        if isinstance(next(self.events), yaml.StreamEndEvent):
            raise RecipeError("the file is empty", file=self.file, line=1)
        root = self.node(next(self.events), ())
        next(self.events)  # the document's end
        if not isinstance(after := next(self.events), yaml.StreamEndEvent):
            raise self.error(after, (), "a recipe file holds one YAML document")
        return root

    def node(self, event: yaml.Event, path: NodePath) -> Tree:
        if len(path) > MAX_DEPTH:
            raise self.error(event, path[:3], f"nested deeper than {MAX_DEPTH}")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise self.error(
                    event, path, f"alias *{quoted(str(event.anchor))} has no anchor (or is inside its own anchor)"
                )
            return self.anchors[event.anchor]
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if event.tag is not None:
            raise self.error(event, path, f"a recipe is plain data; the tag {shown(event.tag)} is not allowed")
        if isinstance(event, yaml.MappingStartEvent):
            tree = self.mapping(event, path)
        elif isinstance(event, yaml.SequenceStartEvent):
            tree = self.sequence(event, path)
        else:
            assert isinstance(event, yaml.ScalarEvent)
            if re.search("[\ud800-\udfff]", event.value):
                raise self.error(event, path, f"half a character (a lone surrogate) in {shown(event.value)}")
            tree = Tree(_scalar(event), self.file, _line(event))
        if tree.size > MAX_NODES:
            raise self.error(event, path, f"more than {MAX_NODES} nodes")
        if event.anchor is not None:
            self.anchors[event.anchor] = tree
        return tree

    def mapping(self, start: yaml.Event, path: NodePath) -> Tree:
        children: dict[str, Tree] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.node(event, (*path, "?")).value
            if not isinstance(key, str):
                raise self.error(event, path, "a key must be a text; put it in quotes")
            if len(key) > MAX_KEY or not key.isprintable():
                raise self.error(
                    event, path, f"a key is printable text of at most {MAX_KEY} characters, not {shown(key)}"
                )
            child_path = (*path, key)
            if key in children:
                raise self.error(event, child_path, f"the key {key!r} occurs twice, first in line {children[key].line}")
            child = self.node(next(self.events), child_path)
            # An entry is located at its key: errors about it point there even if the value starts on the next line.
            children[key] = Tree(child.value, self.file, _line(event), child.size)
        return mapping(children, self.file, _line(start))

    def sequence(self, start: yaml.Event, path: NodePath) -> Tree:
        items: list[Tree] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.node(event, (*path, str(len(items)))))
            if len(items) > MAX_NODES:
                raise self.error(event, path, f"more than {MAX_NODES} nodes")
        return Tree(tuple(items), self.file, _line(start), 1 + sum(item.size for item in items))

    def error(self, event: yaml.Event, path: NodePath, message: str) -> RecipeError:
        return RecipeError(message, file=self.file, line=_line(event), node=".".join(path) or None)


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None  # only events made by hand have none
    return event.start_mark.line + 1


def _scalar(event: yaml.ScalarEvent) -> Scalar:
    text: str = event.value
    if event.style:  # quoted, or a block of text
        return text
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return text[0] in "tT"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
