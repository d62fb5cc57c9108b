"""Logs: how a process writes its lines, as text or as a JSON object each, and the log files of its children.

What is known of the work at hand (a job, a chunk, a request, a trace) is set once, by whoever begins it, and stands in
each line that its thread or task writes meanwhile. A child has its log file itself as stdout and stderr, not a pipe: it
never blocks on a slow reader, and its last words are there when its parent was killed. Files are opened for appending,
so they can be shortened while they are written. Imports the standard library only: model processes log too.
"""

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, Final, TextIO

TEXT: Final = "text"
JSON: Final = "json"
LINE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# Fields that every line of a process has; those of the work at hand have other names.
_OWN: Final = ("time", "level", "logger", "message", "process", "pid")

_known: ContextVar[Mapping[str, Any]] = ContextVar("known_of_the_work", default=MappingProxyType({}))
_format: str = TEXT


@contextmanager
def logging_with(**known: Any) -> Iterator[None]:
    """Add to each line of JSON that is written in the block, as `job_id` or `chunk_id`."""
    token = _known.set({**_known.get(), **known})
    try:
        yield
    finally:
        _known.reset(token)


class JsonFormatter(logging.Formatter):
    """A line is one object: ASCII, so that no terminal, pipe or half of a surrogate pair spoils it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
            "pid": record.process,
        }
        line |= {name: value for name, value in _known.get().items() if name not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


def begin_logging(
    process: str, level: str | int, log_format: str, *, line: str = LINE, stream: TextIO | None = None
) -> None:
    """Send the log lines of this process to stderr in this form from now on; in JSON, warnings and last errors too."""
    global _format
    _format = log_format
    if log_format != JSON:
        logging.basicConfig(level=level, format=line, stream=stream)
        return
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(process))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = _log_last_error


def chosen_format() -> str:
    """Return the log format of this process, for the processes that it starts."""
    return _format


def reform_handlers(process: str) -> None:
    """Give handlers that a library has made, as Celery does, the form of ours; nothing where lines are text."""
    if _format != JSON:
        return
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            handler.setFormatter(JsonFormatter(process))


def _log_last_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logging.getLogger(__name__).critical(
        "Process %d ends with an error.", os.getpid(), exc_info=(kind, error, traceback)
    )


MAX_LOG_BYTES = 20 * 1024 * 1024
TAIL_BYTES = 8192


def open_log(path: Path) -> BinaryIO:
    """Return the file opened for appending, made with its directory if need be, readable by its owner only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600, exist_ok=True)
    rotate_log(path)
    return path.open("ab", buffering=0)


def rotate_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move the content of a file that grew too large to PATH.1, replacing the last such.

    The writer keeps its open file, so content is copied and then cut off; lines written in between are lost.
    """
    if path.exists() and path.stat().st_size > max_bytes:
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        with path.open("r+b") as log:
            log.truncate(0)


def tail_of(path: Path | None, lines: int = 20) -> str:
    """Return the last lines of the file for an error message, indented; empty when there is nothing to show."""
    if path is None or not path.exists():
        return ""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return "".join(f"\n    {line}" for line in text.splitlines()[-lines:])
