"""The log of a server: lines of text, or JSON with one object per line."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any, Literal

from fastgen.serving.monitoring.log_queue import LogQueue
from fastgen.serving.output import STDERR

# The environment variable with the log format, for the processes that a server starts.
FORMAT_VARIABLE = "FASTGEN_LOG_FORMAT"


def set_up_logging(log_format: Literal["text", "json"]) -> LogQueue:
    """Writes all log messages of the server to standard error, and hands the format to the processes that it starts."""
    os.environ[FORMAT_VARIABLE] = log_format
    # uvicorn's warnings are about mistakes of clients, and the clients receive them as errors.
    return _log_to_stderr(log_format, fastgen=logging.INFO, uvicorn=logging.ERROR)


def set_up_logging_of_engine() -> None:
    """Writes the warnings and errors of the engine's process to standard error, in the server's format."""
    _log_to_stderr(os.environ.get(FORMAT_VARIABLE, "text"), fastgen=logging.WARNING)


def _log_to_stderr(log_format: str, **levels: int) -> LogQueue:
    queue = LogQueue(STDERR)
    queue.setFormatter(JsonLines() if log_format == "json" else TextLines())
    for name, level in levels.items():
        logger = logging.getLogger(name)
        for old in logger.handlers:
            old.close()
        logger.handlers[:] = [queue]
        logger.setLevel(level)
        logger.propagate = False
    return queue


class TextLines(logging.Formatter):
    """Formats ``fastgen: message``, followed by its facts."""

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = getattr(record, "facts", {})
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        pairs = " ".join(f"{name}={value!r}" for name, value in facts.items())
        text = f"fastgen: {level}{record.getMessage()}" + (f" {pairs}" if pairs else "")
        return text + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonLines(logging.Formatter):
    """Formats one object per line: ``time`` (UTC), ``level``, ``message``, and its facts."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # in ASCII: some readers split lines at U+2028 and the like
