"""A context-free grammar with one agreement feature, used both to generate and to recognise.

Rules are plain data: a mapping from a nonterminal to its productions.  A production is a string of tokens
separated by blanks; ``<name>`` refers to a nonterminal, everything else is a terminal (a word or a punctuation mark).

A nonterminal may carry a gender, ``<he:h>``.  In a production a lower-case variable stands for the gender; the same
variable has the same value throughout one production, which is what makes pronouns agree.  A rule's key names the
case it covers: ``he:f`` (one gender only), ``kind:g`` (any gender; ``g`` is bound inside) or ``place`` (no gender).
No production is empty, and none refers back to its own nonterminal before its first word (no left recursion).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from random import Random

GENDERS = ("f", "m")

_REFERENCE = re.compile(r"<(\w+)(?::(\w))?>")
_TOKEN = re.compile(r"[A-Za-z]+|'s|[.,!?\"]")
_CLOSING = {".", ",", "!", "?", "'s"}
_TERMINAL_MARKS = {".", "!", "?"}

Symbol = tuple[str, str]  # (nonterminal, gender or "")
Item = str | Symbol  # a terminal, or a reference to a nonterminal
Table = dict[Symbol, list[tuple[Item, ...]]]  # the alternatives of each nonterminal
_Memo = dict[tuple[Symbol, int], frozenset[int]]


def tokenize(text: str) -> list[str]:
    """The words and punctuation marks of ``text``; anything else is skipped (see ``Grammar.recognises``)."""
    return _TOKEN.findall(text)


def detokenize(tokens: Iterable[str]) -> str:
    """English spelling of ``tokens``: blanks, capitals at the start of a sentence or a quotation."""
    text = ""
    quoted = False  # inside a quotation
    glue = True  # the next token follows without a blank
    capital = True  # the next word starts a sentence
    for token in tokens:
        if token == '"':
            text += '"' if quoted or glue else ' "'
            quoted = not quoted
            glue = quoted
            capital = quoted
            continue
        text += token_text(token, capital) if glue or token in _CLOSING else " " + token_text(token, capital)
        glue = False
        capital = token in _TERMINAL_MARKS
    return text


def token_text(token: str, capital: bool) -> str:
    """``token`` with its first letter raised if ``capital``."""
    return token[:1].upper() + token[1:] if capital else token


class Grammar:
    """Rules in the notation of this module, and the sentences they stand for.

    ``starts`` are the nonterminals, taken without a gender, that derive one whole sentence each.
    """

    def __init__(self, rules: Mapping[str, Sequence[str]], starts: Collection[str]) -> None:
        self._rules = {key: [_parse_production(text) for text in texts] for key, texts in rules.items()}
        self._generic = {key.split(":")[0]: key for key in rules}
        self._starts: list[Symbol] = [(start, "") for start in starts]
        table = self._instantiate()
        self.words = {item for alternatives in table.values() for items in alternatives for item in items
                      if isinstance(item, str) and item[0].isalpha()}  # fmt: skip
        self._by_first = _index_by_first_token(table)
        self._proper = {word.lower(): word for word in self.words if word != word.lower()}
        clash = self.words & self._proper.keys()
        if clash:
            raise ValueError(f"words that are also proper names: {sorted(clash)}")

    def expand(self, symbol: str, rng: Random, genders: Mapping[str, str], bound: Mapping[str, str]) -> list[str]:
        """Tokens of a random derivation of ``symbol``.

        ``genders`` gives the value of every gender variable; ``bound`` fixes the text of some nonterminals,
        which is how the sentences of one story come to speak of the same hero.
        """
        name, _, gender = symbol.partition(":")
        if name in bound:
            return bound[name].split()
        key, scope = self._lookup(name, gender)
        tokens: list[str] = []
        for item in rng.choice(self._rules[key]):
            if isinstance(item, str):
                tokens.append(item)
            else:
                value = _value(item[1], {**genders, **scope})
                tokens += self.expand(f"{item[0]}:{value}" if value else item[0], rng, genders, bound)
        return tokens

    def recognises(self, sentence: str) -> bool:
        """Returns whether ``sentence`` is, to the letter, the spelling of a derivation of one of the start symbols."""
        tokens = [self._proper.get(token.lower(), token.lower()) for token in tokenize(sentence)]
        if not tokens or detokenize(tokens) != sentence:
            return False
        memo: _Memo = {}
        return any(len(tokens) in self._ends(start, 0, tokens, memo) for start in self._starts)

    def _ends(self, symbol: Symbol, begin: int, tokens: list[str], memo: _Memo) -> frozenset[int]:
        """All positions where a phrase ``symbol`` starting at ``begin`` can end."""
        known = memo.get((symbol, begin))
        if known is not None:
            return known
        found: set[int] = set()
        first = tokens[begin] if begin < len(tokens) else ""
        for items in self._by_first[symbol].get(first, ()):
            fronts = {begin}
            for item in items:
                if isinstance(item, str):
                    fronts = {at + 1 for at in fronts if at < len(tokens) and tokens[at] == item}
                else:
                    fronts = {end for at in fronts for end in self._ends(item, at, tokens, memo)}
                if not fronts:
                    break
            found |= fronts
        memo[symbol, begin] = result = frozenset(found)
        return result

    def _lookup(self, name: str, gender: str) -> tuple[str, dict[str, str]]:
        """The key of the rule for ``name`` with ``gender``, and the variable it binds."""
        exact = f"{name}:{gender}" if gender else name
        if exact in self._rules:
            return exact, {}
        key = self._generic[name]
        return key, {key.partition(":")[2]: gender}

    def _instantiate(self) -> Table:
        """Every nonterminal reachable from the starts, with all gender variables replaced by their values."""
        table: Table = {}
        todo = list(self._starts)
        while todo:
            symbol = todo.pop()
            if symbol in table:
                continue
            key, scope = self._lookup(*symbol)
            table[symbol] = alternatives = []
            for production in self._rules[key]:
                variables = {item[1] for item in production if not isinstance(item, str)} - {"", *GENDERS, *scope}
                for values in product(GENDERS, repeat=len(variables)):
                    assigned = {**scope, **dict(zip(sorted(variables), values, strict=True))}
                    items = tuple(
                        item if isinstance(item, str) else (item[0], _value(item[1], assigned)) for item in production
                    )
                    alternatives.append(items)
                    todo += [item for item in items if not isinstance(item, str)]
        return table


def _index_by_first_token(table: Table) -> dict[Symbol, dict[str, list[tuple[Item, ...]]]]:
    """For each nonterminal, its alternatives by each token they can begin with."""
    index: dict[Symbol, dict[str, list[tuple[Item, ...]]]] = {}

    def visit(symbol: Symbol) -> None:
        if symbol in index:
            return
        by_first: dict[str, list[tuple[Item, ...]]] = {}
        for items in table[symbol]:
            head = items[0]
            if not isinstance(head, str):
                visit(head)
            for token in [head] if isinstance(head, str) else index[head]:
                by_first.setdefault(token, []).append(items)
        index[symbol] = by_first

    for symbol in table:
        visit(symbol)
    return index


def _value(variable: str, assigned: Mapping[str, str]) -> str:
    """The gender that ``variable`` stands for; a literal gender or no gender stands for itself."""
    return variable if variable in ("", *GENDERS) else assigned[variable]


def _parse_production(text: str) -> tuple[Item, ...]:
    items: list[Item] = []
    for token in text.split():
        reference = _REFERENCE.fullmatch(token)
        items.append((reference[1], reference[2] or "") if reference else token)
    return tuple(items)
