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
from fastgen.runtime.sampling.finite.lark import Alternative, LarkParts, Part, Scope, UnreadableError, Use, read_lark
from fastgen.runtime.sampling.finite.schema import with_finite_parts

# What stands for a piece that may be missing, and always is.
_MISSING = '""'
# What can make a terminal empty: an intersection, a complement, or a class of characters that has none.
_MAY_BE_EMPTY = re.compile(r"&|~|\[\^|\\P|--")
_NAME = re.compile(r"_?[A-Z][_A-Z0-9\-]*")
# Terminals of a grammar that are tried. The others count as having a text.
_MOST_TRIED = 1_000
# What the terminals of a grammar inside another cost, beside each of them.
_COST_OF_SCOPE = 20
# A longer grammar stays as it is: reading 30,000 characters takes up to 0.3 s.
_MOST_CHARACTERS = 30_000
_MOST_SHOWN = 60
# The text between two places becomes another.
_Edit = tuple[int, int, str]


def finite_grammar(text: str, emptiness: Emptiness) -> str:
    """Returns the grammar ``text``, which the library has accepted, without what has no finite text. One that is not
    known here is returned as it is.

    :raises ValueError: where the whole has none.
    """
    if len(text) > _MOST_CHARACTERS:
        return text
    try:
        parts = read_lark(text)
    except UnreadableError:
        return text
    reachable = parts.reachable()
    edits: list[_Edit] = []
    ways = dict(parts.ways)
    for use in parts.uses:
        kind = use.part[0]
        if kind == "rule":
            ways.setdefault(use.part, [()])  # an imported terminal may be named like a rule
        elif kind == "schema" and use.rule in reachable:
            with contextlib.suppress(ValueError):
                schema = parts.schemas[use.part]
                if with_finite_parts(schema, emptiness):
                    edits.append((use.begin, use.end, f"%json {json.dumps(schema, ensure_ascii=False)}"))
                ways[use.part] = [()]
    terminals = sorted(part for part in reachable if part[0] == "terminal")
    empty = _empty(terminals, parts, emptiness)
    ways |= {part: [()] for part in terminals if part not in empty}
    found = derivable(ways)
    if parts.start not in found:
        raise ValueError(_refusal(text, parts, found, empty))
    # Nothing that is left needs what stands in a rule without a text.
    finite = found & reachable
    for rule, alternatives in parts.choices:
        if rule in finite:
            edits += _left_out(alternatives, [not found.issuperset(each.needs) for each in alternatives])
    edits += [(use.begin, use.end, _MISSING) for use in parts.uses if _is_missing(use, parts, finite, found)]
    return _edited(text, edits)


def _is_missing(use: Use, parts: LarkParts, finite: set[Part], found: set[Part]) -> bool:
    """Returns whether a rule with a text refers to what has none. Rules that count as completed stay as they are."""
    return use.rule in finite and use.part not in found and parts.ways[use.rule] != [()]


def _left_out(alternatives: list[Alternative], is_endless: list[bool]) -> Iterator[_Edit]:
    """Yields what leaves out some of the ``alternatives`` of a choice. If there is no other, the choice may be missing,
    for it is in a rule with a text.
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


def _refusal(text: str, parts: LarkParts, found: set[Part], empty: set[Part]) -> str:
    """Returns why the first alternative of ``start`` has no text."""
    # Choices inside others come before these. A rule with attributes has none.
    choices = [alternatives for rule, alternatives in parts.choices if rule == parts.start]
    if choices:
        first = choices[-1][0]
        missing, begin, end = next(need for need in first.needs if need not in found), first.begin, first.end
    else:
        use = next(use for use in parts.uses if use.rule == parts.start)
        missing, begin, end = use.part, use.begin, use.end
    kind, _, name = missing
    if missing in empty:
        why = f"{name} matches nothing"
    elif kind == "schema":
        why = "its JSON schema has no finite value"
    else:
        why = f"{name if kind == 'rule' else 'a part'} can never be completed"
    own = " ".join(text[begin:end].split())
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
    num_left = _MOST_TRIED
    for number, scope in parts.scopes.items():
        suspects = _suspects(scope)
        own = [part for part in terminals if part[1] == number and _may_be_empty(part[2], suspects)][:num_left]
        if own:
            num_left = max(0, num_left - len(own) - _COST_OF_SCOPE)
            definitions = [f"{name}: {text}" for name, (text, _) in scope.definitions.items()]
            numbers = emptiness.empty_terminals("\n".join([*scope.imports, *definitions]), [part[2] for part in own])
            found |= {own[each] for each in numbers}
    return found


def _may_be_empty(text: str, suspects: set[str]) -> bool:
    return bool(_MAY_BE_EMPTY.search(text)) or not suspects.isdisjoint(_NAME.findall(text))


def _suspects(scope: Scope) -> set[str]:
    """Returns the names of the terminals that may be empty, by what their definitions hold or name."""
    return derivable(
        {
            name: [()] if _MAY_BE_EMPTY.search(text) else [(other,) for other in names]
            for name, (text, names) in scope.definitions.items()
        }
    )
