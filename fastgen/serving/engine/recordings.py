"""The flight recording of a served engine, written on a thread of its own, since that takes longer than a step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from fastgen.runtime.flight.recorder import Recorder
from fastgen.runtime.flight.recording_file import dump_recording
from fastgen.serving.engine.messages import RecordingReply
from fastgen.serving.engine.recent_requests import MAX_REMEMBERED

# Sends an answer. It is given a function that returns the recording, or raises.
Answer = Callable[[Callable[[], RecordingReply]], None]


class Recordings:
    """Answers questions for the recording of ``recorder``. ``model`` is the model's name in it."""

    def __init__(self, recorder: Recorder, model: str):
        self._recorder, self._model = recorder, model
        self._asked: list[tuple[Answer, Future[RecordingReply]]] = []
        self._request_ids: OrderedDict[int, int] = OrderedDict()
        dump_recording(*recorder.contents(model))  # the first one builds what writes them, which would hold up a step

    def submitted(self, number: int, request_id: int) -> None:
        """Remembers the id that the engine gave the request of message ``number``."""
        self._request_ids[number] = request_id
        if len(self._request_ids) > MAX_REMEMBERED:
            self._request_ids.popitem(last=False)

    def ask(self, answer: Answer) -> None:
        """Begins to write the recording, which ends here: later steps are not part of it. ``answer`` is called in a
        later :meth:`proceed`.
        """
        header, events = self._recorder.contents(self._model)
        request_ids = dict(self._request_ids)
        written: Future[RecordingReply] = Future()

        def write() -> None:
            try:
                written.set_result(RecordingReply(dump_recording(header, events), request_ids))
            except Exception as error:
                written.set_exception(error)

        threading.Thread(target=write, name="recording", daemon=True).start()
        self._asked.append((answer, written))

    def proceed(self) -> None:
        """Sends the answers that are complete by now."""
        for answer, written in [asked for asked in self._asked if asked[1].done()]:
            self._asked.remove((answer, written))
            answer(written.result)
