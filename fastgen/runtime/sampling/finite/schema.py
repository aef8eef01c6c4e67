"""Forbids the parts of a JSON schema that no finite value satisfies.

An object that requires another of its own kind has no finite value, and neither has what requires it. An answer that
began such a part could never end. So each of these parts becomes unsatisfiable, as ``false`` is, and the library leaves
it out: the optional property, the branch of ``anyOf``, the further items of an array.

What a value must satisfy together is looked at together: ``allOf``, ``$ref`` and the keywords beside them. Only what
stands in the schema can be forbidden, so one case stays: two parts that have values each but none in common, where
``allOf`` joins the properties of two objects. Keywords and references that are not known here count as satisfied.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any
from urllib.parse import unquote

from fastgen.runtime.sampling.finite.derivable import derivable
from fastgen.runtime.sampling.finite.emptiness import Emptiness

# How much is looked at, in schemas of each combination of choices: some 0.1 s. A schema that needs more stays as it is.
_MOST_WORK = 200_000
# How many patterns of properties are tried, and the names that they are compared with: some 0.1 s each.
_MOST_TRIED = 100
_MOST_COMPARED = 500
# Keywords whose value is a schema, a list of schemas (or a schema), and an object of schemas.
_ONE = ("additionalProperties", "additionalItems")
_SOME = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties")
_CHOICES = ("anyOf", "oneOf")
# Keywords beside which a reference stands for what it names.
_ANNOTATIONS = {"$ref", "title", "description", "default", "examples", "$comment"}
# Keywords that divide those before them from those after them.
_IN_PLACE = {"const", "enum", "allOf", "anyOf", "oneOf", "$ref"}
_COMPOSED = {"array", "object"}
_TYPES = {"null", "boolean", "integer", "number", "string"} | _COMPOSED
# The draft that has ``prefixItems``; it is also that of a schema without ``$schema``.
_NEWEST_DRAFT = "2020-12"
# Schemas that a value must satisfy together, by their identity.
_Together = frozenset[int]
# Schemas by their identity.
_Path = frozenset[int]


def finite_schema(text: str, emptiness: Emptiness) -> str:
    """Returns the JSON schema ``text`` with parts that all have a finite value. Raises as :func:`with_finite_parts`."""
    try:
        schema = json.loads(text)
    except ValueError:  # an integer with more digits than Python reads
        return text
    return json.dumps(schema, ensure_ascii=False) if with_finite_parts(schema, emptiness) else text


def with_finite_parts(schema: Any, emptiness: Emptiness) -> bool:
    """Changes ``schema``, as ``json.loads`` returns it, so that each of its parts has a finite value. Returns whether
    there was something to change.

    :raises ValueError: where the whole has none because it holds itself.
    """
    is_changed = _remove_covered_patterns(_Places(schema).all, emptiness)
    try:
        return _forbid_endless(_Places(schema), emptiness) or is_changed
    except (_TooLargeError, RecursionError):
        return is_changed


class _TooLargeError(Exception):
    """The schema takes more than ``_MOST_WORK``."""


class _Places:
    """The schemas that an answer can come to from ``root``, and where references lead."""

    def __init__(self, root: Any):
        self.root = root
        # Each once, the root first.
        self.all: list[dict[str, Any]] = []
        # Whether references may be relative to something else than the root.
        self._has_bases = False
        # Whether all of it is of a draft that has ``prefixItems``.
        self.is_newest = True
        self._targets: dict[str, Any] = {}
        seen: set[int] = set()
        pending = [root]
        while pending:
            schema = pending.pop()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            self.all.append(schema)
            self._has_bases |= self._is_base(schema)
            self.is_newest &= _NEWEST_DRAFT in str(schema.get("$schema", _NEWEST_DRAFT))
            pending += [holder[key] for holder, key in _holders(schema)]
            pending.append(self.target(schema))

    def target(self, schema: dict[str, Any]) -> Any:
        """Returns the schema that the ``$ref`` of ``schema`` names; ``True`` where there is none that is known."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or self._has_bases:
            return True
        if reference not in self._targets:
            self._targets[reference] = self._named(reference)
        return self._targets[reference]

    def _named(self, reference: str) -> Any:
        if reference in ("", "#"):
            return self.root
        if not reference.startswith("#/"):
            return True
        place = self.root
        for step in unquote(reference[2:]).split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                place = place[int(key)] if isinstance(place, list) else place[key]
            except (LookupError, TypeError, ValueError):
                return True
            if self._is_base(place):
                return True
        return place

    def _is_base(self, place: Any) -> bool:
        if place is self.root or not isinstance(place, dict):
            return False
        return isinstance(place.get("$id"), str) or isinstance(place.get("id"), str)  # as of draft 4


def _holders(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields the list or object that holds each subschema, and its key there."""
    for name in _ONE:
        if name in schema:
            yield schema, name
    for name in _SOME:
        if isinstance(schema.get(name), list):
            yield from ((schema[name], place) for place in range(len(schema[name])))
        elif name in schema:
            yield schema, name
    for name in _NAMED:
        yield from ((schema[name], key) for key in _object(schema, name))


def _forbid_endless(places: _Places, emptiness: Emptiness) -> bool:
    """Makes unsatisfiable what has no finite value. Returns whether there was any. Raises as its caller does, and
    ``_TooLargeError``.
    """
    if not any("$ref" in schema for schema in places.all):
        return False
    ways = _Ways(places, emptiness)
    found = derivable(ways.of_all())
    endless = [
        (holder, key)
        for schema in places.all
        for holder, key in _holders(schema)
        if isinstance(holder[key], dict) and ways.together([holder[key]]) not in found
    ]
    if ways.together([places.root]) not in found:
        for schema in (places.root, *(holder[key] for holder, key in endless)):
            if "$ref" in schema:
                raise ValueError(
                    f"no finite JSON value satisfies the schema: from {schema['$ref']!r:.80} on, each would hold "
                    f"another, without end; let it be left out, be null or be empty somewhere"
                )
    for holder, key in endless:
        # What is inside stays, since it may be referred to from elsewhere. At the end, and first there: a reference
        # before it is not followed, and nothing after it is joined with one.
        forbidden = {name: value for name, value in holder[key].items() if name != "allOf"}
        holder[key] = forbidden | {"allOf": [False, *_list(holder[key], "allOf")]}
    return bool(endless)


class _Ways:
    """How values of schemas can be completed: what must be completed inside them."""

    def __init__(self, places: _Places, emptiness: Emptiness):
        self._places, self._emptiness = places, emptiness
        self._schemas: dict[int, Any] = {}
        self._named: dict[int, Any] = {}
        self._work = 0

    def together(self, schemas: Iterable[Any]) -> _Together:
        """Returns the key of what must hold together."""
        own = [schema for schema in map(self._meant, schemas) if isinstance(schema, dict) or schema is False]
        self._schemas.update((id(schema), schema) for schema in own)
        return frozenset(map(id, own))

    def _meant(self, schema: Any) -> Any:
        """Returns ``schema``, or the one that it names if it does nothing else."""
        names = []
        while isinstance(schema, dict) and "$ref" in schema and schema.keys() <= _ANNOTATIONS:
            if id(schema) in self._named:
                schema = self._named[id(schema)]
                break
            # One that names itself, also through others, stands for itself.
            self._named[id(schema)] = schema
            names.append(schema)
            schema = self._places.target(schema)
        self._named.update((id(each), schema) for each in names)
        return schema

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > _MOST_WORK:
            raise _TooLargeError

    def of_all(self) -> dict[Any, list[tuple[Any, ...]]]:
        """Returns the ways to complete each schema, and each part that is needed for that. A part is a key of schemas,
        or a tuple of keys of which one is enough.
        """
        ways: dict[Any, list[tuple[Any, ...]]] = {}
        pending: list[Any] = [self.together([schema]) for schema in self._places.all]
        while pending:
            part = pending.pop()
            if part not in ways:
                ways[part] = [(key,) for key in part] if isinstance(part, tuple) else list(self._of(part))
                pending.extend(chain.from_iterable(ways[part]))
        return ways

    def _of(self, together: _Together) -> Iterator[tuple[Any, ...]]:
        for schemas in self._combinations([(self._schemas[each], frozenset()) for each in together], [], []):
            types = _TYPES.intersection(*map(_types, schemas))
            if not types <= _COMPOSED or any("const" in schema or "enum" in schema for schema in schemas):
                yield ()
                return
            if "array" in types:
                yield self._items(schemas)
            if "object" in types:
                yield self._properties(schemas)

    def _combinations(
        self,
        pending: list[tuple[Any, _Path]],
        found: list[dict[str, Any]],
        choices: list[tuple[list[Any], _Path]],
    ) -> Iterator[list[dict[str, Any]]]:
        """Yields all that a value must satisfy together, for each combination of its choices.

        ``pending`` and ``choices`` come with the schemas that lead to them. One that leads to itself, without anything
        around it, has no value by that way.
        """
        self._spend(1 + len(found))
        found, choices = [*found], [*choices]
        seen = set(map(id, found))
        while pending:
            schema, path = pending.pop()
            if schema is False or id(schema) in path:
                return
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            self._spend(1 + len(path) // 8)
            seen.add(id(schema))
            found.append(schema)
            path = path | {id(schema)}
            pending += [(each, path) for each in (*_list(schema, "allOf"), self._places.target(schema))]
            choices += [(schema[name], path) for name in _CHOICES if isinstance(schema.get(name), list)]
        if not choices:
            yield found
            return
        options, path = choices.pop()
        for option in options:
            yield from self._combinations([(option, path)], found, choices)

    def _items(self, schemas: list[dict[str, Any]]) -> tuple[Any, ...]:
        """Returns what the items are that an array must have."""
        prefixes, rests = [], []
        for schema in schemas:
            items = schema.get("items")
            if isinstance(items, list):
                prefixes.append(items)
                rests.append(schema.get("additionalItems") if schema.keys().isdisjoint(_IN_PLACE) else True)
            else:
                has_prefix = self._places.is_newest and "additionalItems" not in schema
                prefixes.append(_list(schema, "prefixItems") if has_prefix else [])
                rests.append(items)
        # After the longest prefix all items are alike.
        num_items = min(_most(schemas, "minItems"), 1 + max(map(len, prefixes)))
        return tuple(
            self.together(
                prefix[place] if place < len(prefix) else rest for prefix, rest in zip(prefixes, rests, strict=True)
            )
            for place in range(num_items)
        )

    def _properties(self, schemas: list[dict[str, Any]]) -> tuple[Any, ...]:
        """Returns what the properties are that an object must have. Where more must be there than are required, the
        last stands for any one more.
        """
        required = dict.fromkeys(name for schema in schemas for name in _names(schema))
        needed = [self._property(schemas, name) for name in required]
        if _most(schemas, "minProperties") <= len(required):
            return tuple(needed)
        named = dict.fromkeys(name for schema in schemas for name in _object(schema, "properties"))
        more = [self._property(schemas, name) for name in named if name not in required]
        more += [self.together([each]) for schema in schemas for each in _object(schema, "patternProperties").values()]
        return (*needed, (*more, self._property(schemas, None)))

    def _property(self, schemas: list[dict[str, Any]], name: str | None) -> _Together:
        """Returns what the property ``name`` must satisfy, or for ``None`` one that no schema names. What patterns ask
        of that is left out.
        """
        self._spend(len(schemas))
        found = []
        for schema in schemas:
            properties, patterns = _object(schema, "properties"), _object(schema, "patternProperties")
            asked = [properties[name]] if name in properties else []
            if name is not None:
                self._spend(100 * len(patterns))
                asked += [own for pattern, own in patterns.items() if self._emptiness.matches(pattern, name)]
            if not asked and not (name is None and patterns):
                asked = [schema.get("additionalProperties")]
            found += asked
        return self.together(found)


def _remove_covered_patterns(schemas: list[dict[str, Any]], emptiness: Emptiness) -> bool:
    """Removes patterns of properties that match named properties only, from objects that allow no others. Otherwise a
    comma could come that nothing can follow. The named properties keep what the pattern asks of them. Returns whether
    there were any.
    """
    num_changed = num_tried = num_compared = 0
    for schema in schemas:
        patterns, properties = _object(schema, "patternProperties"), _object(schema, "properties")
        if not patterns or schema.get("additionalProperties") is not False:
            continue
        # Properties that are named as required only come after the others.
        names = list(dict.fromkeys((*properties, *_names(schema))))
        covered = []
        for pattern in patterns:
            num_tried, num_compared = num_tried + 1, num_compared + len(names)
            if num_tried > _MOST_TRIED or num_compared > _MOST_COMPARED:
                break
            # Without an anchor at its beginning it matches names without number.
            if names and ("^" in pattern or r"\A" in pattern) and emptiness.is_covered(pattern, names):
                covered.append(pattern)
        if covered:
            own = schema["properties"] = {
                name: properties.get(name, any(emptiness.matches(each, name) for each in patterns)) for name in names
            }
            for pattern in covered:
                asked = patterns.pop(pattern)
                for name in names:
                    if emptiness.matches(pattern, name):
                        own[name] = _joined(own[name], asked)
            num_changed += 1
    return num_changed > 0


def _joined(schema: Any, other: Any) -> Any:
    """Returns a schema that asks for both. What is inside ``schema`` keeps its place, since it may be referred to."""
    if not isinstance(schema, dict):
        return schema and other
    return schema | {"allOf": [*_list(schema, "allOf"), other]}


def _types(schema: dict[str, Any]) -> set[str]:
    given = schema.get("type")
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list):
        return _TYPES
    names = {*filter(_is_name, types)}
    return names | {"integer"} if "number" in names else names


def _names(schema: dict[str, Any]) -> Iterator[str]:
    """Yields the names of the required properties."""
    return filter(_is_name, _list(schema, "required"))


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _most(schemas: list[dict[str, Any]], name: str) -> int:
    """Returns the largest count of that name."""
    counts = [schema.get(name) for schema in schemas]
    return max((count for count in counts if isinstance(count, int)), default=0)


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _object(schema: dict[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}
