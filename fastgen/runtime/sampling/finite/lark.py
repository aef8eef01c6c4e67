"""Reads llguidance's variant of Lark as far as it takes to see which rules have a finite text.

The library checks the notation. This reader takes what the library has accepted, and raises :class:`UnreadableError`
where it does not know a piece.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# The tokens of the notation, longer ones before those that begin like them.
_TOKEN = re.compile(
    r"""
    (?P<space> (?: (?:\#|//)[^\n]* | [ \t] )+ )
    | (?P<newline> (?:\r?\n)+[ \t]* )
    | (?P<string> "(?:\\.|[^"\\\n])*"i? )
    | (?P<regex> /(?:\\.|[^/\\])+/[imslux]* )
    | (?P<keyword> %[a-z]+ )
    | (?P<special> <[^<>\s]+> )
    | (?P<grammar> @[a-zA-Z0-9_\-]+ )
    | (?P<rule> !?[_?]?[a-z][_a-z0-9\-]* )
    | (?P<terminal> _?[A-Z][_A-Z0-9\-]* )
    | (?P<number> 0[xX][0-9a-fA-F]+ | [+-]?[0-9]+ )
    | (?P<sign> :: | -> | \.\. | [-:,.(){}\[\]~|&=_+*?] )
    """,
    re.VERBOSE | re.DOTALL,
)
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()
_OF_JSON = ("%json", "%regex", "%llguidance")
# What ends a sequence of pieces.
_ENDS = {"|", ")", "]", "}", "->", "&", "newline", "end"}
# A part of a grammar that may have a finite text: a rule, a choice, a terminal or a JSON schema.
Part = tuple[str, int, str]


class UnreadableError(Exception):
    """The reader does not know a piece of the grammar."""


@dataclass(frozen=True)
class Alternative:
    """One alternative of a choice, with its place in the text."""

    needs: tuple[Part, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Use:
    """A part that a rule names or holds, with its place in the text."""

    rule: Part
    part: Part
    begin: int
    end: int


@dataclass
class Scope:
    """Holds the terminals that a grammar defines, each with the names in its definition."""

    definitions: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    # Lines with ``%import``, which define terminals too.
    imports: list[str] = field(default_factory=list)


@dataclass
class LarkParts:
    """The parts of a grammar, and how they need each other."""

    # The ways to complete each rule and choice. Terminals and schemas have none here.
    ways: dict[Part, list[tuple[Part, ...]]] = field(default_factory=dict)
    # The choices, inner ones first, each with the rule that it is in.
    choices: list[tuple[Part, list[Alternative]]] = field(default_factory=list)
    # All that rules refer to, needed or not.
    uses: list[Use] = field(default_factory=list)
    schemas: dict[Part, Any] = field(default_factory=dict)
    # By the place where a grammar begins: ``%lark`` holds others.
    scopes: dict[int, Scope] = field(default_factory=dict)

    @property
    def start(self) -> Part:
        return "rule", 0, "start"

    def reachable(self) -> set[Part]:
        """Returns the parts that an answer can come to, if all have a text."""
        named: dict[Part, list[Part]] = {}
        for use in self.uses:
            named.setdefault(use.rule, []).append(use.part)
        found: set[Part] = set()
        pending = [self.start]
        while pending:
            part = pending.pop()
            if part not in found:
                found.add(part)
                pending += named.get(part, ())
        return found


def read_lark(text: str) -> LarkParts:
    """Returns the parts of the grammar ``text``. Raises :class:`UnreadableError`."""
    try:
        reader = _Reader(text)
        reader.items(0)
    except (ValueError, RecursionError):
        raise UnreadableError from None
    return reader.parts


class _Token(NamedTuple):
    # Signs and the end are their own kind.
    kind: str
    text: str
    begin: int
    end: int


def _tokens(text: str) -> list[_Token]:
    found = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise UnreadableError
        kind, own, end = str(match.lastgroup), match.group(), match.end()
        if own in _OF_JSON:
            begin = _SPACE.match(text, end)
            assert begin is not None  # it matches no space too
            _, end = _DECODER.raw_decode(text, begin.end())
        if kind != "space":
            found.append(_Token(own if kind in ("sign", "keyword") else kind, own, place, end))
        place = end
    return [*found, _Token("end", "", place, place)]


class _Reader:
    """Reads one grammar, token by token."""

    def __init__(self, text: str):
        self._tokens = _tokens(text)
        self._place = 0
        self._rule: Part | None = None
        self._text = text
        self.parts = LarkParts()

    @property
    def _next(self) -> _Token:
        return self._tokens[self._place]

    @property
    def _last(self) -> _Token:
        return self._tokens[self._place - 1]

    def _take(self, *kinds: str) -> _Token:
        token = self._next
        if token.kind == "end" or (kinds and token.kind not in kinds):
            raise UnreadableError
        self._place += 1
        return token

    def _skip(self, *kinds: str) -> bool:
        """Takes the next token if it is one of these. Returns whether it was."""
        is_one = self._next.kind in kinds
        self._place += is_one
        return is_one

    def items(self, scope: int) -> None:
        """Reads definitions up to the end of the text, or to the brace that ends ``%lark``."""
        self.parts.scopes[scope] = Scope()
        while True:
            while self._skip("newline"):
                pass
            match self._next.kind:
                case "end" | "}":
                    return
                case "rule":
                    self._define_rule(scope)
                case "terminal":
                    self._define_terminal(scope)
                case "%import":
                    begin, end, _ = self._line()
                    self.parts.scopes[scope].imports.append(self._text[begin:end])
                case "%ignore" | "%llguidance":
                    self._line()
                case _:
                    raise UnreadableError

    def _define_rule(self, scope: int) -> None:
        name = self._take("rule").text.lstrip("!?")
        outer, self._rule = self._rule, ("rule", scope, name)
        attributes = self._attributes()
        if self._skip("::"):
            # A parameter decides what is possible. It counts as completed.
            self.parts.ways[self._rule] = [()]
            self._scan(scope)
        elif attributes.issubset({"capture"}) or self._tokens[self._place + 1].kind in ("%json", "%lark", "grammar"):
            self._take(":")
            self.parts.ways[self._rule] = [(self._choice(scope),)]
        else:
            self._take(":")
            begin, end, _ = self._line()
            terminal: Part = "terminal", scope, self._text[begin:end]
            # One of no tokens is empty, whatever it holds.
            self.parts.ways[self._rule] = [()] if "max_tokens=0" in attributes else [(terminal,)]
            self.parts.uses.append(Use(self._rule, terminal, begin, end))
        self._rule = outer

    def _attributes(self) -> set[str]:
        """Takes the attributes of a rule. Returns their names, and ``max_tokens=0`` if that is one."""
        found = set()
        if self._skip("["):
            while not self._skip("]"):
                name = self._take().text
                if self._skip("="):
                    value = self._take().text
                    while self._next.kind not in (",", "]"):
                        value += self._take().text
                    name = "max_tokens=0" if (name, value) == ("max_tokens", "0") else name
                found.add(name)
                self._skip(",")
        return found

    def _scan(self, scope: int) -> None:
        """Takes the rest of a definition, and notes what it refers to."""
        assert self._rule is not None
        _, _, tokens = self._line()
        for token in tokens:
            if token.kind == "rule":
                self._use(("rule", scope, token.text.lstrip("!?")), token.begin, token.end)
            elif token.kind == "%json":
                self._schema(token)

    def _define_terminal(self, scope: int) -> None:
        name = self._take("terminal").text
        self._take(":")
        begin, end, tokens = self._line()
        names = {token.text for token in tokens if token.kind == "terminal"}
        self.parts.scopes[scope].definitions[name] = self._text[begin:end], names

    def _line(self) -> tuple[int, int, list[_Token]]:
        """Takes the tokens of a definition. Returns its place in the text, and them. Lines may begin with ``|``."""
        first = self._place
        depth = 0
        while self._next.kind != "end" and (depth or not (self._next.kind == "}" or self._is_end_of_line())):
            depth += {"{": 1, "}": -1}.get(self._next.kind, 0)
            self._take()
        tokens = self._tokens[first : self._place]
        end = tokens[-1].end if tokens else self._next.begin
        return self._tokens[first].begin, end, tokens

    def _is_end_of_line(self) -> bool:
        return self._next.kind == "newline" and self._tokens[self._place + 1].kind != "|"

    def _choice(self, scope: int) -> Part:
        """Reads alternatives. Returns the part that stands for them."""
        assert self._rule is not None
        choice: Part = "choice", self._next.begin, ""
        alternatives = []
        while True:
            begin = end = self._next.begin
            needs = []
            while self._next.kind not in _ENDS:
                needs += self._piece(scope)
                end = self._last.end
            if self._skip("->"):
                end = self._take("rule").end
            alternatives.append(Alternative(tuple(needs), begin, end))
            if self._next.kind == "newline" and not self._is_end_of_line():
                self._take()
            if not self._skip("|"):
                break
        self.parts.ways[choice] = [each.needs for each in alternatives]
        self.parts.choices.append((self._rule, alternatives))
        return choice

    def _piece(self, scope: int) -> list[Part]:
        """Reads a piece with its repetition. Returns what it needs; nothing if it may be missing."""
        needs = self._atom(scope)
        if self._skip("?", "*"):
            return []
        if self._skip("+"):
            return needs
        if self._next.kind == "~" and self._tokens[self._place + 1].kind == "number":
            self._take()
            least = int(self._take("number").text)
            if self._skip(".."):
                self._take("number")
            return needs if least else []
        if self._skip("{"):
            least = 0 if self._next.kind == "," else int(self._take("number").text)
            if self._skip(","):
                self._skip("number")
            self._take("}")
            return needs if least else []
        return needs

    def _atom(self, scope: int) -> list[Part]:
        token = self._take()
        match token.kind:
            case "(":
                choice = self._choice(scope)
                self._take(")")
                return [choice]
            case "[":
                self._choice(scope)
                self._take("]")
                return []
            case "rule":
                takes_parameter = self._skip("::")
                if takes_parameter:
                    self._parameter()
                rule = self._use(("rule", scope, token.text.lstrip("!?")), token.begin, self._last.end)
                return [] if takes_parameter else [rule]
            case "%json":
                return [self._schema(token)]
            case "%lark":
                self._take("{")
                inner = self._next.begin
                self.items(inner)
                self._take("}")
                return [self._use(("rule", inner, "start"), token.begin, self._last.end)]
            case "~" | "string" | "regex" | "terminal" | "%regex":
                return [self._terminal(scope, token)]
            case "special" | "grammar":
                return []
        raise UnreadableError

    def _parameter(self) -> None:
        if self._take("number", "_", "rule").kind == "rule":
            self._take("(")
            while not self._skip(")"):
                self._take("number", "_", ",", "[", "]", ":")

    def _schema(self, token: _Token) -> Part:
        schema: Part = "schema", token.begin, ""
        self.parts.schemas[schema] = json.loads(self._text[token.begin + len(token.text) : token.end])
        return self._use(schema, token.begin, token.end)

    def _terminal(self, scope: int, token: _Token) -> Part:
        """Reads the rest of a terminal that begins with ``token``."""
        if token.kind == "~":
            self._after_not()
        elif token.kind == "string" and self._skip(".."):
            self._take("string")
        end = self._last.end
        return self._use(("terminal", scope, self._text[token.begin : end]), token.begin, end)

    def _use(self, part: Part, begin: int, end: int) -> Part:
        assert self._rule is not None
        self.parts.uses.append(Use(self._rule, part, begin, end))
        return part

    def _after_not(self) -> None:
        token = self._take("(", "[", "string", "regex", "terminal", "%regex")
        if token.kind in ("(", "["):
            depth = 1
            while depth:
                depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(self._take().kind, 0)
        elif token.kind == "string" and self._skip(".."):
            self._take("string")
