"""Logging: format a process's log lines as text or JSON, and manage the log files of child processes.

The context of the current work (a job, a chunk, a request, a trace) is set once and added to each JSON line
that its thread or task writes meanwhile. A child writes to its log file directly and not to a pipe, so that
it never blocks on a slow reader, and its last lines survive the parent's death. Files are opened for
appending, so that they can be truncated while they are written. Imports hardly more than the standard library,
because model processes log too.
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

from vectormill.domain.credentials import hide_credentials

TEXT: Final = "text"
JSON: Final = "json"
LINE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# Fields that every JSON line has; fields of the current work cannot replace them.
_OWN: Final = ("time", "level", "logger", "message", "process", "pid")

_known: ContextVar[Mapping[str, Any]] = ContextVar("known_of_the_work", default=MappingProxyType({}))
_format: str = TEXT


@contextmanager
def logging_with(**known: Any) -> Iterator[None]:
    """Add these fields, such as `job_id` or `chunk_id`, to each JSON line that is logged in the block."""
    token = _known.set({**_known.get(), **known})
    try:
        yield
    finally:
        _known.reset(token)


class LineFormatter(logging.Formatter):
    """Formats a log record as text, without the credentials of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return hide_credentials(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formats a log record as one JSON object in ASCII, which is safe for every terminal and pipe.

    Lone surrogates are escaped as well.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": hide_credentials(record.getMessage()),
            "process": self._process,
            "pid": record.process,
        }
        line |= {name: value for name, value in _known.get().items() if name not in _OWN}
        if record.exc_info:
            line["exception"] = hide_credentials(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


def begin_logging(
    process: str, level: str | int, log_format: str, *, line: str = LINE, stream: TextIO | None = None
) -> None:
    """Configure logging of this process to stderr, as text or JSON.

    With JSON, Python warnings and the exception that ends the process are logged too.
    """
    global _format
    _format = log_format
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(process) if log_format == JSON else LineFormatter(line))
    logging.basicConfig(level=level, handlers=[handler])
    if log_format != JSON:
        return
    logging.captureWarnings(True)

    def log_last_error(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, traceback)
        else:
            logging.getLogger(__name__).critical(
                "Process %d is ending with an error.", os.getpid(), exc_info=(kind, error, traceback)
            )

    sys.excepthook = log_last_error


def chosen_format() -> str:
    """Return the log format of this process, which child processes should use too."""
    return _format


def reform_handlers(process: str) -> None:
    """Set the JSON formatter on handlers that a library, such as Celery, has made.

    Does nothing if this process logs text.
    """
    if _format != JSON:
        return
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            handler.setFormatter(JsonFormatter(process))


MAX_LOG_BYTES = 20 * 1024 * 1024
TAIL_BYTES = 8192


def open_log(path: Path) -> BinaryIO:
    """Open a log file for appending, readable by its owner only.

    The file and its directory are created if missing. Raise OSError if it is a link, which another user may have put
    there.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rotate_log(path)
    return open(path, "ab", buffering=0, opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def rotate_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move the content of a log file that is too large to PATH.1, replacing an earlier PATH.1.

    The writer keeps its open file, so the content is copied and then truncated; lines written in between are
    lost.
    """
    if not path.exists() or path.stat().st_size <= max_bytes:
        return
    older = path.with_name(path.name + ".1")
    older.unlink(missing_ok=True)
    with open(path, "r+b", opener=_open_private) as log, open(older, "xb", opener=_open_private) as copy:
        shutil.copyfileobj(log, copy)
        log.truncate(0)


def tail_of(path: Path | None, lines: int = 20) -> str:
    """Return the last lines of a log file, indented, for an error message; empty if there are none."""
    if path is None or not path.exists():
        return ""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return "".join(f"\n    {line}" for line in text.splitlines()[-lines:])
