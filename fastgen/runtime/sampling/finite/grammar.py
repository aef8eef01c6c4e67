"""Leaves out the alternatives of a Lark grammar that no finite text satisfies.

A rule that needs itself has no finite text, and neither has an alternative that needs such a rule. An answer that began
one could never end. A terminal that matches nothing is found by the library's lexer.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

from fastgen.runtime.sampling.finite.derivable import derivable
from fastgen.runtime.sampling.finite.emptiness import Emptiness
from fastgen.runtime.sampling.finite.lark import Alternative, LarkParts, Part, Scope, UnreadableError, read_lark
from fastgen.runtime.sampling.finite.schema import with_finite_parts

# What stands for a piece that may be missing, and always is.
_MISSING = '""'
# What can make a terminal empty: an intersection, a complement, or a class of characters that has none.
_MAY_BE_EMPTY = re.compile(r"&|~|\[\^|\\P|--")
# Terminals of a grammar that are tried. The others count as having a text.
_MOST_TRIED = 1_000
_MOST_SHOWN = 60
# The text between two places becomes another.
_Edit = tuple[int, int, str]


def finite_grammar(text: str, emptiness: Emptiness) -> str:
    """Returns the grammar ``text``, which the library has accepted, without what has no finite text. One that is not
    known here is returned as it is.

    :raises ValueError: where the whole has none.
    """
    try:
        parts = read_lark(text)
    except UnreadableError:
        return text
    reachable = parts.reachable()
    edits: list[_Edit] = []
    ways = dict(parts.ways)
    for leaf in parts.leaves:
        if leaf.part[0] == "schema" and leaf.rule in reachable:
            with contextlib.suppress(ValueError):
                schema = parts.schemas[leaf.part]
                if with_finite_parts(schema, emptiness):
                    edits.append((leaf.begin, leaf.end, f"%json {json.dumps(schema, ensure_ascii=False)}"))
                ways[leaf.part] = [()]
    terminals = sorted(part for part in reachable if part[0] == "terminal")
    empty = _empty(terminals, parts, emptiness)
    ways |= {part: [()] for part in terminals if part not in empty}
    found = derivable(ways)
    for rule, alternatives in parts.choices:
        if rule in reachable:
            missing = [[need for need in each.needs if need not in found] for each in alternatives]
            if any(missing) and rule == parts.start and parts.start not in found:
                place, parts_missing = next((place, own) for place, own in enumerate(missing) if own)
                own = alternatives[place]
                raise ValueError(_refusal(text[own.begin : own.end], parts_missing[0], empty))
            edits += _left_out(alternatives, [bool(each) for each in missing])
    leaves = (leaf for leaf in parts.leaves if leaf.rule in reachable and leaf.part not in found)
    edits += [(leaf.begin, leaf.end, _MISSING) for leaf in leaves]
    return _edited(text, edits)


def _left_out(alternatives: list[Alternative], is_endless: list[bool]) -> Iterator[_Edit]:
    """Yields what leaves out some of the ``alternatives`` of a choice. If there is no other, nothing that an answer can
    come to needs the choice.
    """
    if all(is_endless):
        yield alternatives[0].begin, alternatives[-1].end, _MISSING
        return
    first = is_endless.index(False)
    for place, own in enumerate(alternatives):
        if is_endless[place] and place < first:
            yield own.begin, alternatives[place + 1].begin, ""
        elif is_endless[place]:
            yield alternatives[place - 1].end, own.end, ""


def _refusal(alternative: str, missing: Part, empty: set[Part]) -> str:
    kind, _, name = missing
    if missing in empty:
        why = f"{name} matches nothing"
    elif kind == "schema":
        why = "its JSON schema has no finite value"
    else:
        why = f"{name} can never be completed"
    own = " ".join(alternative.split())
    shown = own if len(own) <= _MOST_SHOWN else f"{own[:_MOST_SHOWN]}…"
    return f"no finite text satisfies the grammar; in rule 'start' none satisfies {shown!r}: {why}"


def _edited(text: str, edits: list[_Edit]) -> str:
    """Returns ``text`` with the ``edits``, except those that lie in others."""
    pieces = []
    place = 0
    for begin, end, own in sorted(edits, key=lambda edit: (edit[0], -edit[1])):
        if begin >= place:
            pieces += [text[place:begin], own]
            place = end
    return "".join([*pieces, text[place:]])


def _empty(terminals: list[Part], parts: LarkParts, emptiness: Emptiness) -> set[Part]:
    """Returns the ``terminals`` that match nothing."""
    found: set[Part] = set()
    for number, scope in parts.scopes.items():
        own = [part for part in terminals if part[1] == number and _may_be_empty(part[2], scope)][:_MOST_TRIED]
        if own:
            definitions = [f"{name}: {text}" for name, (text, _) in scope.definitions.items()]
            bodies = [text for _, _, text in own]
            numbers = emptiness.empty_terminals("\n".join([*scope.imports, *definitions]), bodies)
            found |= {own[each] for each in numbers}
    return found


def _may_be_empty(text: str, scope: Scope) -> bool:
    seen: set[str] = set()
    pending = [text]
    while pending:
        own = pending.pop()
        if own in scope.definitions:
            if own in seen:
                continue
            seen.add(own)
            own, names = scope.definitions[own]
            pending += names
        if _MAY_BE_EMPTY.search(own):
            return True
    return False
