"""Exit codes and error sentences of all commands. Contains no command.

Imports only the standard library and the error classes, because it is loaded before any command runs.
"""

import sys
from typing import Any, Final

from vectormill.cli.extras import describe_missing_package, find_missing_package
from vectormill.domain.errors import Unavailable, VectormillError
from vectormill.jobs.job import COMPLETED, COMPLETED_WITH_ERRORS

SUCCESS: Final = 0
ITEMS_FAILED: Final = 1
BAD_INPUT: Final = 2
UNAVAILABLE: Final = 3
JOB_NOT_COMPLETED: Final = 4
BUG: Final = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells count

EXIT_CODES_HELP: Final = (
    "Exit codes: 0 every item has its result, 1 some items failed, 2 bad usage or input, "
    "3 service unavailable, 4 job failed or cancelled, 130 interrupted."
)


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
