"""What a server says while it runs: lines for people, or JSON, one object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal


def set_up_logging(log_format: Literal["text", "json"]) -> None:
    """Have all that the server logs written to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    # uvicorn's warnings are of clients' mistakes, which the clients are told.
    for name, level in (("fastgen", logging.INFO), ("uvicorn", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


class TextLines(logging.Formatter):
    """``fastgen: message``, and the facts of it behind."""

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = getattr(record, "facts", {})
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        told = " ".join(f"{name}={value!r}" for name, value in facts.items())
        text = f"fastgen: {level}{record.getMessage()}" + (f" {told}" if told else "")
        return text + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonLines(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``message``, and the facts of it."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
