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
# Patterns of properties that are tried, which takes about 1 ms each.
_MOST_TRIED = 100
# Keywords whose value is a schema, a list of schemas (or a schema), and an object of schemas.
_ONE = ("additionalProperties", "additionalItems")
_SOME = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties")
_CHOICES = ("anyOf", "oneOf")
# Keywords beside which a reference stands for what it names.
_ANNOTATIONS = {"$ref", "title", "description", "default", "examples", "$comment"}
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
        return _forbid_endless(_Places(schema)) or is_changed
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
        seen: set[int] = set()
        pending = [root]
        while pending:
            schema = pending.pop()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            self.all.append(schema)
            self._has_bases |= self._is_base(schema)
            pending += [holder[key] for holder, key in _holders(schema)]
            pending.append(self.target(schema))

    def target(self, schema: dict[str, Any]) -> Any:
        """Returns the schema that the ``$ref`` of ``schema`` names; ``True`` where there is none that is known."""
        reference = schema.get("$ref")
        if reference == "#":
            return True if self._has_bases else self.root
        if not isinstance(reference, str) or not reference.startswith("#/") or self._has_bases:
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
        return place is not self.root and isinstance(place, dict) and isinstance(place.get("$id"), str)


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


def _forbid_endless(places: _Places) -> bool:
    """Makes unsatisfiable what has no finite value. Returns whether there was any. Raises as its caller does, and
    ``_TooLargeError``.
    """
    if not any("$ref" in schema for schema in places.all):
        return False
    ways = _Ways(places)
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
        # At the end, so that a reference still comes first. What is inside may be referred to from elsewhere.
        forbidden = dict(holder[key])
        forbidden["allOf"] = [*_list(forbidden, "allOf"), False]
        holder[key] = forbidden
    return bool(endless)


class _Ways:
    """How values of schemas can be completed: what must be completed inside them."""

    def __init__(self, places: _Places):
        self._places = places
        self._schemas: dict[int, Any] = {}
        self._named: dict[int, Any] = {}
        self._work = 0
        self._has_prefix_items = _NEWEST_DRAFT in str(places.root.get("$schema", _NEWEST_DRAFT))

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
            is_list = isinstance(items, list)
            prefix = items if is_list else _list(schema, "prefixItems") if self._has_prefix_items else []
            prefixes.append(prefix or [])
            rests.append(schema.get("additionalItems") if is_list else items)
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
        is left out.
        """
        self._spend(len(schemas))
        found = []
        for schema in schemas:
            properties = _object(schema, "properties")
            if name in properties:
                found.append(properties[name])
            elif not _object(schema, "patternProperties"):
                found.append(schema.get("additionalProperties"))
        return self.together(found)


def _remove_covered_patterns(schemas: list[dict[str, Any]], emptiness: Emptiness) -> bool:
    """Removes patterns of properties that match named properties only, from objects that allow no others. Otherwise a
    comma could come that nothing can follow. The named properties keep what the pattern asks of them. Returns whether
    there were any.
    """
    num_changed = num_tried = 0
    for schema in schemas:
        patterns = _object(schema, "patternProperties")
        names = list(dict.fromkeys((*_object(schema, "properties"), *_names(schema))))
        if not patterns or not names or schema.get("additionalProperties") is not False:
            continue
        for pattern, asked in list(patterns.items()):
            # Without an anchor at its beginning it matches names without number.
            if not ("^" in pattern or r"\A" in pattern) or num_tried == _MOST_TRIED:
                continue
            num_tried += 1
            if not emptiness.is_covered(pattern, names):
                continue
            properties = schema.setdefault("properties", {})
            for name in names:
                if emptiness.matches(pattern, name):
                    properties[name] = {"allOf": [properties[name], asked]} if name in properties else asked
            del patterns[pattern]
            num_changed += 1
    return num_changed > 0


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
