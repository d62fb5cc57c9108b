"""Lines and files of logs."""

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.sources import ROOT
from vectormill.processes.logs import JsonFormatter, logging_with, open_log, rotate_log, tail_of


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(stream: io.StringIO) -> Iterator[logging.Logger]:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("api"))
    logger = logging.getLogger("tests.json")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield logger
    logger.removeHandler(handler)


def read_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_with_time_level_logger_message_and_process() -> None:
    # Not logged: pytest keeps what is, and cannot send half of a surrogate pair from one of its processes to another.
    values = {
        "name": "tests.json",
        "levelname": "WARNING",
        "msg": "%d chunks of %s\nwait",
        "args": (3, "zwölf \ud800"),
    }
    (line,) = read_lines(io.StringIO(JsonFormatter("api").format(logging.makeLogRecord(values))))
    assert line["time"].endswith("+00:00")
    assert (line["level"], line["logger"], line["message"], line["process"]) == (
        "WARNING", "tests.json", "3 chunks of zwölf \ud800\nwait", "api",
    )  # fmt: skip


def test_what_is_known_of_the_work_stands_in_every_line_of_it_and_in_no_other(
    logger: logging.Logger, stream: io.StringIO
) -> None:
    with logging_with(job_id="j", chunk_id=1):
        with logging_with(chunk_id=2, message="no"):
            logger.info("inner")
        logger.info("outer")
        thread = threading.Thread(target=logger.info, args=("another thread",))
        thread.start()
        thread.join()
        copy_context().run(logger.info, "a thread that took the context over")
    logger.info("after")
    known = [(line["message"], line.get("job_id"), line.get("chunk_id")) for line in read_lines(stream)]
    assert known == [
        ("inner", "j", 2),
        ("outer", "j", 1),
        ("another thread", None, None),
        ("a thread that took the context over", "j", 1),
        ("after", None, None),
    ]


PROGRAM = """
import logging, warnings
from vectormill.processes.logs import begin_logging, reform_handlers
begin_logging("worker", "INFO", "{}")
library = logging.getLogger("some.library")
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("%(message)s"))
library.addHandler(handler)
library.propagate = False
reform_handlers("worker")
library.warning("a library speaks")
warnings.warn("old")
raise RuntimeError("the end")
"""


def run(log_format: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", PROGRAM.format(log_format)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()


def test_whatever_a_process_says_is_json_down_to_the_error_that_ends_it() -> None:
    library, warning, end = (json.loads(line) for line in run("json"))
    assert (library["logger"], library["message"], library["process"]) == (
        "some.library", "a library speaks", "worker",
    )  # fmt: skip
    assert "old" in warning["message"]
    assert (end["level"], end["exception"].splitlines()[-1]) == ("CRITICAL", "RuntimeError: the end")


def test_a_log_is_made_with_its_directory_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    for line in (b"one\n", b"two\n"):
        with open_log(path) as log:
            log.write(line)
    assert path.read_bytes() == b"one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_that_grew_too_large_is_cut_while_it_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with open_log(path) as log:
        log.write(b"x" * 100)
        rotate_log(path, max_bytes=200)
        assert path.stat().st_size == 100
        rotate_log(path, max_bytes=50)
        log.write(b"y")
    assert path.read_bytes() == b"y"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 100


def test_the_last_lines_are_shown(tmp_path: Path) -> None:
    for content, tail in [
        (b"", ""),
        (b"a\nb\nc\n", "\n    b\n    c"),
        (b"a\nb\xff\n", "\n    a\n    b\N{REPLACEMENT CHARACTER}"),  # a child may write anything
    ]:
        path = tmp_path / "a.log"
        path.write_bytes(content)
        assert tail_of(path, lines=2) == tail
        assert tail_of(tmp_path / "missing") == ""
        assert tail_of(None) == ""
