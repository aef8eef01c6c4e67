"""Parses tool calls from an answer's text as it comes.

A call is emitted as soon as its name is known to be that of an existing tool and its arguments have begun. From then on
its arguments are emitted as they come, exactly as the model writes them. Text that cannot become a call is content.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastgen.serving.tools.formats import NamedCall, ObjectCall, ToolFormat

_MAX_NAME = 64
# Members of a call that models write besides its name and arguments.
_OTHER_KEYS = ("type", "id", "tool_call_id")
_Steps = Generator[None, None, None]
_Reads = Generator[None, None, str]


@dataclass
class Content:
    """Text that is not part of a call."""

    text: str
    # How many characters of the answer come before it.
    begin: int = field(default=0, compare=False)


@dataclass
class CallBegins:
    """Call number ``index`` of the answer begins."""

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
    """The text read so far cannot become a call."""


class _TextEndsError(Exception):
    """The answer has no more text."""


class ToolCallParser:
    """Parses one answer. ``names`` are the names of the existing tools."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str]):
        self._format, self._names = tool_format, names
        self._marks = tool_format.opening.split()
        # The text not discarded yet; the part before ``_at`` has been read.
        self._text = ""
        self._at = 0
        # Text read before ``_text``, of a call that may still turn out not to be one.
        self._held: list[str] = []
        # How many characters of the answer come before these.
        self._begin = 0
        # How many characters of ``_held`` and ``_text`` are the opening.
        self._num_opening = 0
        self._is_over = False
        self._events: list[Event] = []
        self.num_calls = 0
        self._steps = self._read_answer()
        next(self._steps)

    def feed(self, text: str) -> list[Event]:
        """Takes more of the answer; returns the events that are certain now."""
        if self._at:
            self._held.append(self._text[: self._at])
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._continue()

    def finish(self) -> list[Event]:
        """Ends the answer; returns the events held back so far."""
        self._is_over = True
        return self._continue()

    def _continue(self) -> list[Event]:
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
                self._undo_reading()
            except _TextEndsError:
                self._undo_reading()
                if self._text.find(self._marks[0]) < 0:
                    # Spaces at the end of an answer are content, but not those after a call.
                    self._emit_content(len(self._text) if self._text.strip() or not self.num_calls else 0)
                    return

    def _find_section(self, *, is_start: bool) -> _Steps:
        """Emits text up to the beginning of a section, and reads the first mark of its opening."""
        if is_start and self._format.is_opening_optional:
            begin = yield from self._peek()
            self._undo_reading()
            if begin == "{":
                return
        mark = self._marks[0]
        num_blank = 0  # characters at the beginning of the text, which may be many: they are looked at once
        while (found := self._text.find(mark, num_blank)) < 0:
            self._emit_content(self._num_certain(mark, num_blank))
            num_blank = max(0, len(self._text) - len(mark))
            yield from self._more()
        num_before = len(self._text[:found].rstrip())
        self._emit_content(num_before)
        self._at = self._num_opening = found - num_before + len(mark)

    def _num_certain(self, mark: str, num_blank: int) -> int:
        """Returns how many characters are content, whatever follows. The text does not hold ``mark``, and begins with
        ``num_blank`` blanks.
        """
        text = self._text[num_blank:]
        held = next((size for size in range(min(len(mark), len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
        num_seen = len(text[: len(text) - held].rstrip())
        return num_blank + num_seen if num_seen else 0

    def _read_section(self) -> _Steps:
        """Reads the calls after an opening, up to the closing."""
        for mark in self._marks[1:]:
            yield from self._literal(mark)
        separator, closing = self._format.separator, self._format.closing.strip()
        while True:
            if isinstance(self._format.call, ObjectCall):
                yield from self._read_object(self._format.call)
            else:
                yield from self._read_named(self._format.call)
            if separator is None or not (yield from self._has_next_call(separator.strip(), closing)):
                break
        yield from self._end_mark(closing)

    def _has_next_call(self, separator: str, closing: str) -> Generator[None, None, bool]:
        """Returns whether another call follows; reads the separator before it."""
        try:
            following = yield from self._peek()
        except _TextEndsError:
            if closing:
                raise
            return False
        if not separator:
            with self._discarding_cut_off_mark():
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
            self._emit_call(name, early or "{}")
        self._discard_read()

    def _read_arguments(self, name: str) -> _Steps:
        """Emits a call and its arguments as they come, if they are a JSON object."""
        if (yield from self._peek()) != "{":
            self._emit_call(name, (yield from self._value()))
            return
        self._emit_begin(name)
        yield from self._value(is_emitted=True)
        self._emit(CallEnds(self.num_calls - 1))

    # --- emitting events

    def _emit(self, event: Event) -> None:
        """Adds an event; consecutive pieces of content are merged."""
        last = self._events[-1] if self._events else None
        if isinstance(event, Content) and isinstance(last, Content):
            last.text += event.text
        else:
            self._events.append(event)

    def _emit_content(self, size: int) -> None:
        """Emits the first ``size`` characters of the unread text as content."""
        if size:
            self._emit(Content(self._text[:size], self._begin))
            self._begin += size
            self._text = self._text[size:]

    def _emit_begin(self, name: str) -> None:
        if name not in self._names:
            raise _NotACallError
        self._emit(CallBegins(self.num_calls, name))
        self.num_calls += 1
        self._discard_read()

    def _emit_call(self, name: str, arguments: str) -> None:
        """Emits a whole call. Some models write the object as a string, or ``null`` for none."""
        value = _loaded(arguments)
        if isinstance(value, str):
            arguments, value = value, _loaded(value)
        if value is None:
            arguments, value = "{}", {}
        if not isinstance(value, dict):
            raise _NotACallError
        self._emit_begin(name)
        self._emit(Arguments(self.num_calls - 1, arguments))
        self._emit(CallEnds(self.num_calls - 1))

    def _discard_read(self) -> None:
        """Discards the text read so far: it has been emitted, or is not needed."""
        self._begin += sum(map(len, self._held)) + self._at
        self._held.clear()
        self._num_opening = 0
        self._text = self._text[self._at :]
        self._at = 0

    def _undo_reading(self) -> None:
        """Undoes the reading of a failed call: its opening becomes content, and the rest is read again."""
        self._text = "".join(self._held) + self._text
        self._held.clear()
        self._at = 0
        num_opening = self._num_opening
        self._discard_read()
        self._emit_content(num_opening)

    # --- reading: each method waits if the text runs out, and raises _TextEndsError if the answer has ended

    def _more(self) -> _Steps:
        if self._is_over:
            raise _TextEndsError
        yield

    def _peek(self) -> _Reads:
        """Returns the next character that is not a space, without consuming it."""
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
        """Reads the mark after a call."""
        with self._discarding_cut_off_mark():
            yield from self._literal(literal)
        self._discard_read()

    @contextmanager
    def _discarding_cut_off_mark(self) -> Iterator[None]:
        """Discards a mark after a call if the answer ends in the middle of the mark."""
        try:
            yield
        except _TextEndsError:
            self._at = len(self._text)
            self._discard_read()
            raise

    def _string(self) -> _Reads:
        if (yield from self._peek()) != '"':
            raise _NotACallError
        text = _loaded((yield from self._value()))
        assert isinstance(text, str)
        return text

    def _value(self, *, is_emitted: bool = False) -> _Reads:
        """Returns the text of a JSON value, up to the end of its brackets and quotes. With ``is_emitted``, emits the
        text as arguments of the last call as it comes, and returns no text.
        """
        yield from self._peek()
        pieces: list[str] = []
        begin, depth, is_quoted, is_escaped = self._at, 0, False, False
        while True:
            if self._at == len(self._text):
                pieces.append(self._text[begin:])
                if is_emitted:
                    self._emit(Arguments(self.num_calls - 1, pieces.pop()))
                    self._discard_read()
                yield from self._more()
                begin = self._at
                continue
            character = self._text[self._at]
            if depth == 0 and not is_quoted and (character in ",}]" or character.isspace()):
                break  # the end of a number or a word
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
        if is_emitted:
            self._emit(Arguments(self.num_calls - 1, pieces.pop()))
            self._discard_read()
        return "".join(pieces)


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _NotACallError from None
