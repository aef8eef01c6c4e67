"""Calls of tools, read out of an answer's text as it comes.

A call is given out once its name is known, to be that of a tool there is, and its arguments have begun; from then on
the arguments go out as they come, just as the model writes them. What cannot become a call is content like all else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastgen.serving.tools.formats import NamedCall, ObjectCall, ToolFormat

_MAX_NAME = 64
# Members of a call that models write beside its name and arguments.
_OTHER_KEYS = ("type", "id", "tool_call_id")
_Steps = Generator[None, None, None]
_Reads = Generator[None, None, str]


@dataclass
class Content:
    """Text that is not part of a call."""

    text: str


@dataclass
class CallBegins:
    """Call number ``index`` of the answer."""

    index: int
    name: str


@dataclass
class Arguments:
    """More of the arguments of call ``index``, as JSON text."""

    index: int
    text: str


@dataclass
class CallEnds:
    index: int


Event = Content | CallBegins | Arguments | CallEnds


class _NotACallError(Exception):
    """What was read cannot become a call."""


class _TextEndsError(Exception):
    """There is no more text."""


class ToolCallParser:
    """Reads one answer. ``names`` are the tools there are."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str]):
        self._format, self._names = tool_format, names
        self._marks = tool_format.opening.split()
        # What came and is not behind us; of it was read what stands before ``_at``.
        self._text = ""
        self._at = 0
        # What was read before ``_text`` of a call that may yet turn out to be none.
        self._held: list[str] = []
        # How many characters of that, and of ``_text``, are the opening.
        self._num_opening = 0
        self._is_over = False
        self._events: list[Event] = []
        self.num_calls = 0
        self._steps = self._read_answer()
        next(self._steps)

    def feed(self, text: str) -> list[Event]:
        """Take more of the answer; return what is certain now."""
        if self._at:
            self._held.append(self._text[: self._at])
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._go_on()

    def finish(self) -> list[Event]:
        """Return what was held back, no text being to come."""
        self._is_over = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def _read_answer(self) -> _Steps:
        is_start = True
        while True:
            try:
                yield from self._find_section(is_start=is_start)
                is_start = False
                yield from self._read_section()
            except _NotACallError:
                self._take_back()
            except _TextEndsError:
                self._take_back()
                if self._text.find(self._marks[0]) < 0:
                    # Spaces that end an answer are its own, but not those that end a call.
                    self._give_content(len(self._text) if self._text.strip() or not self.num_calls else 0)
                    return

    def _find_section(self, *, is_start: bool) -> _Steps:
        """Give out text up to where a section begins, and read the first mark of its opening."""
        if is_start and self._format.is_opening_optional:
            begin = yield from self._peek()
            self._take_back()
            if begin == "{":
                return
        mark = self._marks[0]
        while (found := self._text.find(mark)) < 0:
            self._give_content(self._num_certain(mark))
            yield from self._more()
        num_before = len(self._text[:found].rstrip())
        self._give_content(num_before)
        self._at = self._num_opening = found - num_before + len(mark)

    def _num_certain(self, mark: str) -> int:
        """How many characters are content, whatever follows."""
        text = self._text
        held = next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
        return len(text[: len(text) - held].rstrip())

    def _read_section(self) -> _Steps:
        """The calls after an opening, up to the closing."""
        for mark in self._marks[1:]:
            yield from self._literal(mark)
        separator, closing = self._format.separator, self._format.closing.strip()
        while True:
            if isinstance(self._format.call, ObjectCall):
                yield from self._read_object(self._format.call)
            else:
                yield from self._read_named(self._format.call)
            if separator is None or not (yield from self._goes_on(separator.strip(), closing)):
                break
        yield from self._end_mark(closing)

    def _goes_on(self, separator: str, closing: str) -> Generator[None, None, bool]:
        """Whether another call follows; a separator before it is read."""
        try:
            following = yield from self._peek()
        except _TextEndsError:
            if closing:
                raise
            return False
        if not separator:
            with self._broken_off_is_no_content():
                return not (yield from self._is_next(closing))
        self._at += following == separator
        return following == separator

    def _read_named(self, call: NamedCall) -> _Steps:
        yield from self._literal(call.before)
        between = call.between.strip()
        while (end := self._text.find(between, self._at)) < 0:
            if len(self._text) - self._at > _MAX_NAME + len(call.between):
                raise _NotACallError
            yield from self._more()
        name = self._text[self._at : end].strip()
        self._at = end + len(between)
        yield from self._read_arguments(name)
        yield from self._end_mark(call.after.strip())

    def _read_object(self, call: ObjectCall) -> _Steps:
        yield from self._literal("{")
        name: str | None = None
        early: str | None = None
        has_arguments = False
        follows = ","
        while follows == ",":
            key = yield from self._string()
            yield from self._literal(":")
            if key == call.name_key and name is None:
                name = yield from self._string()
            elif key == call.arguments_key and not has_arguments:
                has_arguments = True
                if name is None:
                    early = yield from self._value()
                else:
                    yield from self._read_arguments(name)
            elif key in _OTHER_KEYS:
                yield from self._value()
            else:
                raise _NotACallError
            follows = yield from self._peek()
            self._at += 1
        if follows != "}" or name is None:
            raise _NotACallError
        if early is not None or not has_arguments:
            self._give_call(name, early or "{}")
        self._leave_behind()

    def _read_arguments(self, name: str) -> _Steps:
        """Give out a call and its arguments as they come, if they are a JSON object."""
        if (yield from self._peek()) != "{":
            self._give_call(name, (yield from self._value()))
            return
        self._give_begin(name)
        yield from self._value(is_given=True)
        self._give(CallEnds(self.num_calls - 1))

    # --- giving out

    def _give(self, event: Event) -> None:
        """Add to what is given out; pieces of the same become one."""
        last = self._events[-1] if self._events else None
        is_more = isinstance(event, Content) and isinstance(last, Content)
        is_more |= isinstance(event, Arguments) and isinstance(last, Arguments) and last.index == event.index
        if is_more:
            last.text += event.text  # type: ignore[union-attr]
        else:
            self._events.append(event)

    def _give_content(self, size: int) -> None:
        """Of what was not read yet."""
        if size:
            self._give(Content(self._text[:size]))
            self._text = self._text[size:]

    def _give_begin(self, name: str) -> None:
        if name not in self._names:
            raise _NotACallError
        self._give(CallBegins(self.num_calls, name))
        self.num_calls += 1
        self._leave_behind()

    def _give_call(self, name: str, arguments: str) -> None:
        """A whole call. Some models write the object as a string, or ``null`` for none."""
        value = _loaded(arguments)
        if isinstance(value, str):
            arguments, value = value, _loaded(value)
        if value is None:
            arguments, value = "{}", {}
        if not isinstance(value, dict):
            raise _NotACallError
        self._give_begin(name)
        self._give(Arguments(self.num_calls - 1, arguments))
        self._give(CallEnds(self.num_calls - 1))

    def _leave_behind(self) -> None:
        """What was read so far is given out, or of no account."""
        self._held.clear()
        self._num_opening = 0
        self._text = self._text[self._at :]
        self._at = 0

    def _take_back(self) -> None:
        """What was read and not left behind is none of a call's: its opening is content, the rest is read again."""
        self._text = "".join(self._held) + self._text
        self._at = 0
        num_opening = self._num_opening
        self._leave_behind()
        self._give_content(num_opening)

    # --- reading: each waits where the text runs out, and raises _TextEndsError where no more will come

    def _more(self) -> _Steps:
        if self._is_over:
            raise _TextEndsError
        yield

    def _peek(self) -> _Reads:
        """The next character that is no space; it remains to be read."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            yield from self._more()

    def _is_next(self, literal: str) -> Generator[None, None, bool]:
        while len(self._text) - self._at < len(literal) and literal.startswith(self._text[self._at :]):
            yield from self._more()
        return self._text.startswith(literal, self._at)

    def _literal(self, literal: str) -> _Steps:
        if literal:
            yield from self._peek()
            if not (yield from self._is_next(literal)):
                raise _NotACallError
            self._at += len(literal)

    def _end_mark(self, literal: str) -> _Steps:
        """What stands behind a call."""
        with self._broken_off_is_no_content():
            yield from self._literal(literal)
        self._leave_behind()

    @contextmanager
    def _broken_off_is_no_content(self) -> Iterator[None]:
        """Of a mark behind a call, where the answer ends in the middle of it."""
        try:
            yield
        except _TextEndsError:
            self._at = len(self._text)
            self._leave_behind()
            raise

    def _string(self) -> _Reads:
        if (yield from self._peek()) != '"':
            raise _NotACallError
        text = _loaded((yield from self._value()))
        assert isinstance(text, str)
        return text

    def _value(self, *, is_given: bool = False) -> _Reads:
        """The text of a JSON value, up to where its brackets and quotes are closed; or, where ``is_given``, it goes out
        as arguments of the last call as it comes, and none is returned."""
        yield from self._peek()
        pieces: list[str] = []
        begin, depth, is_quoted, is_escaped = self._at, 0, False, False
        while True:
            if self._at == len(self._text):
                pieces.append(self._text[begin:])
                if is_given:
                    self._give(Arguments(self.num_calls - 1, pieces.pop()))
                    self._leave_behind()
                yield from self._more()
                begin = self._at
                continue
            character = self._text[self._at]
            if depth == 0 and not is_quoted and (character in ",}]" or character.isspace()):
                break  # behind a number or a word
            self._at += 1
            if is_escaped:
                is_escaped = False
            elif is_quoted:
                is_escaped, is_quoted = character == "\\", character != '"'
            elif character == '"':
                is_quoted = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            if depth == 0 and not is_quoted and character in '"}]':
                break
        pieces.append(self._text[begin : self._at])
        if is_given:
            self._give(Arguments(self.num_calls - 1, pieces.pop()))
            self._leave_behind()
        return "".join(pieces)


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _NotACallError from None
