"""Exit codes, error sentences and standard streams of all commands. Contains no command.

Imports only the standard library and the error classes, because it is loaded before any command runs.
"""

import errno
import os
import sys
from typing import Any, Final

from vectormill.domain.errors import Unavailable, VectormillError
from vectormill.extras import describe_missing_package, find_missing_package
from vectormill.jobs.job import COMPLETED, COMPLETED_WITH_ERRORS

SUCCESS: Final = 0
ITEMS_FAILED: Final = 1
BAD_INPUT: Final = 2
UNAVAILABLE: Final = 3
JOB_NOT_COMPLETED: Final = 4
BUG: Final = 70  # EX_SOFTWARE of sysexits.h
DISK_FULL: Final = 74  # EX_IOERR
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells count
OUTPUT_CLOSED: Final = 141  # 128 + SIGPIPE

EXIT_CODES_HELP: Final = (
    "Exit codes: 0 every item has its result, 1 some items failed, 2 bad usage or input, "
    "3 service unavailable, 4 job failed or cancelled, 74 disk full, 130 interrupted, 141 output closed."
)

# Why an output cannot be written to its end: the exit code, and a sentence about the file.
WRITE_ERRORS: Final = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT), (DISK_FULL, "The disk is full: {} could not be written completely.")
    ),
    **dict.fromkeys(
        (errno.EPIPE, errno.EBADF), (OUTPUT_CLOSED, "{} was closed before everything was written.")
    ),
}


class CommandFailed(VectormillError):
    """The command could not do all that was asked; `exit_code` says how far it came."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for a command that raised this exception."""
    if isinstance(error, CommandFailed):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
        return WRITE_ERRORS[error.errno][0]
    if isinstance(error, Unavailable) or find_outage(error):
        return UNAVAILABLE
    if isinstance(error, VectormillError | OSError) or find_missing_package(error):
        return BAD_INPUT
    return BUG


def exit_code_of_job(state: str) -> int:
    """Return the exit code for a job that ended in this state."""
    return {COMPLETED: SUCCESS, COMPLETED_WITH_ERRORS: ITEMS_FAILED}.get(state, JOB_NOT_COMPLETED)


def find_outage(error: BaseException) -> str | None:
    """Return what the driver says of a Postgres that cannot be used; None for any other error.

    Whoever raised such an error has loaded SQLAlchemy, so it is not imported for the comparison.
    """
    loaded: Any = sys.modules.get("sqlalchemy.exc")
    if loaded is None or not isinstance(error, loaded.OperationalError):
        return None
    said = str(getattr(error, "orig", error)).strip()
    return said.partition("\n")[0].rstrip(".")


def describe(error: BaseException, command: str | None = None) -> str:
    """Describe an exception in one sentence for people; `command` is the command that raised it."""
    if isinstance(error, VectormillError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted."
    if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
        return WRITE_ERRORS[error.errno][1].format(error.filename or "/dev/stdout")
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    if outage := find_outage(error):
        return f"Postgres cannot be used: {outage}. Check VECTORMILL_DATABASE_URL and that the server runs."
    if package := find_missing_package(error):
        return describe_missing_package(package, command)
    cause = f"{type(error).__name__}: {error}".rstrip(": ").rstrip(".")
    if isinstance(error, OSError):
        return f"{cause}."
    return f"Vectormill failed unexpectedly ({cause}). Run `vectormill --debug …` for the traceback."


def prepare_streams() -> None:
    """Make stdin, stdout and stderr UTF-8 in every locale, and open those that were closed when the process started.

    What cannot be UTF-8, as in a name of a file, is shown as an escape. A closed stream would be None, and the next
    file or socket that is opened would be taken for it; to one that is closed for output nothing can be written.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            flag = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            setattr(sys, name, open(os.open(os.devnull, flag), mode, closefd=False))  # noqa: SIM115
        getattr(sys, name).reconfigure(
            encoding="utf-8", errors="strict" if mode == "r" else "backslashreplace"
        )


def end_streams() -> None:
    """Write what stdout still holds; what cannot be written is left out, since the command has failed before."""
    try:
        sys.stdout.flush()
    except OSError:
        # Python would try again when it exits, and say so in its own words.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
