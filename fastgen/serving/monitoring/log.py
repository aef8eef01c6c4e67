"""The log of a server: lines of text, or JSON with one object per line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal


def set_up_logging(log_format: Literal["text", "json"]) -> None:
    """Writes all log messages of the server to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    # uvicorn's warnings are about mistakes of clients, and the clients receive them as errors.
    for name, level in (("fastgen", logging.INFO), ("uvicorn", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


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
        return json.dumps(line, ensure_ascii=False, default=str)
