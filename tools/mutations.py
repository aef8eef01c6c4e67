"""Single mutations of a source: small changes of meaning that a test should notice.

Python is changed by its syntax tree, and the templates of kernels by their text. Comments, docstrings, annotations,
assertions, and what is logged stay as they are. A mutation replaces a piece of the text, so its diff is what a person
would have typed.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_COMPARED |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
_COMBINED = {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "//", "&": "|", "|": "&", "<<": ">>", ">>": "<<"}
_LOGIC = {"and": "or", "or": "and"}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGGED = re.compile(r"(_log|log|logger|warnings)\.")


class Mutation(NamedTuple):
    """Replaces ``text[start:end]`` by ``new``. ``operator`` says which kind of change that is."""

    operator: str
    start: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


def mutations_of(path: str, text: str) -> list[Mutation]:
    """Returns every single mutation of the source ``text`` of the file at ``path``, in the order of their places."""
    found = _of_python(text) if path.endswith(".py") else _of_template(text, is_cpp=not path.endswith(".py.j2"))
    return sorted(
        {each for each in found if each.apply(text) != text}, key=lambda each: (each.start, each.end, each.new)
    )


def is_valid(path: str, text: str) -> bool:
    """Returns whether a source is free of syntax errors, as far as that can be known of a template."""
    try:
        if path.endswith(".py"):
            compile(text, path, "exec")
    except SyntaxError:
        return False
    return True


# Python


def _of_python(text: str) -> Iterator[Mutation]:
    tree, place = ast.parse(text), _Places(text)
    left_out = [place.span(node) for node in _left_out(tree)]
    for node in ast.walk(tree):
        for mutation in _of_node(node, text, place):
            if not any(first <= mutation.start < last for first, last in left_out):
                yield mutation


def _left_out(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the parts of a module that say what is meant, and do nothing that a test could see."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) or _only_says(node):
            yield node
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from node.exc.args
        elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def _only_says(node: ast.AST) -> bool:
    """Returns whether a node is a docstring, a line for the log, or for type checkers alone."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant | ast.JoinedStr) or _LOGGED.match(ast.unparse(node)) is not None
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("TypeVar", "lru_cache", "cast")


class _Places:
    """Finds where nodes begin and end in a text, counted in characters."""

    def __init__(self, text: str):
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def start(self, node: ast.AST) -> int:
        return self._at(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.start(node), self.end(node)


def _of_node(node: ast.AST, text: str, place: _Places) -> Iterator[Mutation]:
    if isinstance(node, ast.Compare):
        for left, right in itertools.pairwise([node.left, *node.comparators]):
            yield from _between(text, place.end(left), place.start(right), _COMPARED, "comparison")
    elif isinstance(node, ast.BinOp):
        if not _is_text(node.left) and not _is_text(node.right):
            yield from _between(text, place.end(node.left), place.start(node.right), _COMBINED, "arithmetic")
    elif isinstance(node, ast.BoolOp):
        for left, right in itertools.pairwise(node.values):
            yield from _between(text, place.end(left), place.start(right), _LOGIC, "logic")
    elif isinstance(node, ast.AugAssign):
        signs = {f"{sign}=": f"{other}=" for sign, other in _COMBINED.items()}
        yield from _between(text, place.end(node.target), place.start(node.value), signs, "arithmetic")
        yield _dropped(node, place)
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node, place)
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield Mutation("function", *place.span(node), _NAMES[node.id])
    elif isinstance(node, ast.IfExp):
        body, orelse = (text[slice(*place.span(each))] for each in (node.body, node.orelse))
        test = text[slice(*place.span(node.test))]
        yield Mutation("branches", *place.span(node), f"{orelse} if {test} else {body}")
    elif isinstance(node, ast.If | ast.While):
        yield _negated(node.test, text, place)
    elif isinstance(node, ast.comprehension):
        yield from (_negated(each, text, place) for each in node.ifs)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield Mutation("negation", *place.span(node), f"({text[slice(*place.span(node.operand))]})")
    elif isinstance(node, ast.Expr | ast.Continue | ast.Break | ast.Raise | ast.Delete) or _sets_a_part(node):
        yield _dropped(node, place)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield Mutation("statement", *place.span(node), "return None")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _sets_a_part(node: ast.AST) -> bool:
    """Returns whether a statement assigns to an attribute or an item, without which the names are still there."""
    return isinstance(node, ast.Assign) and all(
        isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets
    )


def _between(text: str, start: int, end: int, signs: dict[str, str], operator: str) -> Iterator[Mutation]:
    """Yields the mutation of the operator that stands between two operands, beside brackets and comments."""
    found = re.sub(r"#.*", lambda comment: " " * len(comment[0]), text[start:end])
    match = re.search("|".join(sorted(map(_word, signs), key=len, reverse=True)), found)
    if match is not None:
        sign = re.sub(r"\s+", " ", match[0])
        yield Mutation(operator, start + match.start(), start + match.end(), signs[sign])


def _word(sign: str) -> str:
    spaced = r"\s+".join(map(re.escape, sign.split()))
    return rf"\b{spaced}\b" if sign[0].isalpha() else spaced


def _of_constant(node: ast.Constant, place: _Places) -> Iterator[Mutation]:
    if isinstance(node.value, bool):
        yield Mutation("constant", *place.span(node), str(not node.value))
    elif isinstance(node.value, int):
        yield from (Mutation("constant", *place.span(node), str(node.value + change)) for change in (1, -1))
    elif isinstance(node.value, float):
        yield Mutation("constant", *place.span(node), repr(node.value * 2 if node.value else 1.0))


def _negated(test: ast.expr, text: str, place: _Places) -> Mutation:
    return Mutation("negation", *place.span(test), f"not ({text[slice(*place.span(test))]})")


def _dropped(node: ast.AST, place: _Places) -> Mutation:
    return Mutation("statement", *place.span(node), "pass")


# Templates of kernels, in C++ and in Triton

_TEXT_OPERATORS = [
    ("comparison", r"(?<= )(?:<=?|>=?|==|!=)(?= )"),
    ("arithmetic", r"(?<= )[-+](?=[ =])"),
    ("arithmetic", r"(?<= )(?:\*|//|/|%|<<|>>|&|\|)(?= )"),
    ("logic", r"(?<= )(?:&&|\|\||and|or)(?= )"),
    ("function", r"\b(?:min|max|minimum|maximum|smaller|larger)(?=[(<])"),
    ("constant", r"(?<![\w.\"'])(?<!indent\()\d+(?![\w.\"'])"),
    ("constant", r"\b(?:true|false|True|False)\b"),
    ("width", r"\.to\(tl\.int64\)"),
]
_SWAPPED = _COMPARED | _COMBINED | {"&&": "||", "||": "&&"} | _LOGIC
_SWAPPED |= {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "smaller": "larger"}
_SWAPPED |= {"larger": "smaller", "true": "false", "false": "true", "True": "False", "False": "True"}
_SWAPPED |= {".to(tl.int64)": ""}
_STATEMENT = re.compile(
    r"^( *)((?:tl\.)?[\w.>\[\]-]+(?: [-+*|&]?= [^=\n].*;|\(.*\);)|tl\.store\(.*\)|\w+ [-+*&|]= .*)$", re.M
)
_CPP_CONDITION = re.compile(r"\bif (?:constexpr )?\(")
_CONDITION = re.compile(r"^ *(?:if|elif) ([^:{}\n]+):$", re.M)
_CALLS = ("tl.where(", "select(")


def _of_template(text: str, *, is_cpp: bool) -> Iterator[Mutation]:
    code = _without_comments(text)
    for operator, pattern in _TEXT_OPERATORS:
        for match in re.finditer(pattern, code):
            for other in _replacements(match[0], is_cpp):
                yield Mutation(operator, match.start(), match.end(), other)
    for match in _STATEMENT.finditer(code):
        if not match[2].startswith(("return", "using", "constexpr", "static_assert", "namespace")):
            yield Mutation("statement", match.start(2), match.end(2), "pass" if text[match.end(2) - 1] != ";" else ";")
    for match in _CPP_CONDITION.finditer(code) if is_cpp else ():
        if (end := _closing(code, match.end())) is not None:
            yield Mutation("negation", match.end(), end, f"!({text[match.end() : end]})")
    for match in () if is_cpp else _CONDITION.finditer(code):
        yield Mutation("negation", match.start(1), match.end(1), f"not ({match[1]})")
    yield from _swapped_choices(text, code)


def _replacements(found: str, is_cpp: bool) -> Iterable[str]:
    if is_cpp and found == "%":
        return ["/"]
    if found.isdigit():
        return [str(int(found) + 1), str(int(found) - 1)] if int(found) else ["1"]
    return [_SWAPPED[found]]


def _swapped_choices(text: str, code: str) -> Iterator[Mutation]:
    """Yields the two choices of a selection exchanged."""
    for name in _CALLS:
        for match in re.finditer(re.escape(name), code):
            end = _closing(code, match.end())
            commas = [] if end is None else _commas(code, match.end(), end)
            if end is not None and len(commas) == 2:
                first, second = text[commas[0] + 1 : commas[1]], text[commas[1] + 1 : end]
                yield Mutation("branches", commas[0] + 1, end, f"{second},{first}")


def _closing(code: str, start: int) -> int | None:
    """Returns where the bracket closes that opened just before ``start``, on the same line."""
    depth = 1
    for place in range(start, len(code)):
        if code[place] == "\n":
            return None
        depth += (code[place] in "([{") - (code[place] in ")]}")
        if depth == 0:
            return place
    return None


def _commas(code: str, start: int, end: int) -> list[int]:
    depth, found = 0, []
    for place in range(start, end):
        depth += (code[place] in "([{") - (code[place] in ")]}")
        if code[place] == "," and depth == 0:
            found.append(place)
    return found


def _without_comments(text: str) -> str:
    """Returns ``text`` with comments, docstrings and ``#include`` lines blank, so that places stay the same."""
    for pattern in (r"\{#.*?#\}", r'""".*?"""', r"//.*", r"^\s*#.*", r"  # .*", r"asm .*"):
        text = re.sub(
            pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.M | (re.S if "?" in pattern else 0)
        )
    return text
