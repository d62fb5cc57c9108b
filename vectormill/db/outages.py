"""Classify database errors: whether a retry can help, will fail again, or points to a single value.

Source of the classes: PostgreSQL documentation, appendix A, error codes.
"""

from typing import Final

import psycopg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, TimeoutError

# 08 connection, 40 rollback, 53 out of resources, 57 operator intervention, 58 errors outside Postgres.
PASSING_CLASSES: Final = frozenset({"08", "40", "53", "57", "58"})
# 55P03 lock time-out; 25006 read-only, as on a standby before it is promoted; 25P03 idle in a transaction for
# too long.
PASSING_STATES: Final = frozenset({"55P03", "25006", "25P03"})
# Postgres answered but lacks disk, memory, files or time for the statement, which may last for ever.
SHORTAGE_CLASSES: Final = frozenset({"53", "58"})
STATEMENT_TIMEOUT: Final = "57014"
# 21 a row that one statement would write twice, 22 data, 23 constraint, 42 statement, 54 a limit of Postgres: the same
# statement would fail again.
LASTING_CLASSES: Final = frozenset({"21", "22", "23", "42", "54"})

# The classes of errors that a single row can cause.
VALUE_CLASSES: Final = frozenset({"21", "22", "54"})

# The driver's errors for values that it cannot send.
REFUSALS: Final = (psycopg.DataError, psycopg.ProgrammingError, psycopg.NotSupportedError)
# The errors that a transaction can raise. COPY and the staged upsert use the driver itself, whose errors
# SQLAlchemy does not wrap.
DATABASE_ERRORS: Final = (SQLAlchemyError, psycopg.Error)


def is_outage(error: Exception) -> bool:
    """Return whether a later attempt can succeed.

    Examples are a broken connection, a lock time-out and a deadlock.
    """
    if isinstance(error, TimeoutError):  # of the connection pool
        return True
    cause, sqlstate = _find_cause(error)
    if cause is None:
        return False
    if sqlstate is None:
        return _is_broken(error) or not isinstance(cause, REFUSALS)
    return _is_broken(error) or sqlstate[:2] in PASSING_CLASSES or sqlstate in PASSING_STATES


def is_shortage(error: Exception) -> bool:
    """Return whether Postgres answered but lacked resources or time for the statement.

    A later attempt may or may not succeed.
    """
    _, sqlstate = _find_cause(error)
    return sqlstate is not None and (sqlstate[:2] in SHORTAGE_CLASSES or sqlstate == STATEMENT_TIMEOUT)


def is_lasting(error: Exception) -> bool:
    """Return whether the same statement will fail again, however often it is tried."""
    cause, sqlstate = _find_cause(error)
    if cause is None or _is_broken(error):
        return False
    return isinstance(cause, REFUSALS) if sqlstate is None else sqlstate[:2] in LASTING_CLASSES


def blames_a_value(error: Exception) -> bool:
    """Return whether a lasting error may be caused by one row, so that the other rows can be stored."""
    cause, sqlstate = _find_cause(error)
    if not is_lasting(error):
        return False
    return isinstance(cause, psycopg.DataError) if sqlstate is None else sqlstate[:2] in VALUE_CLASSES


def describe_refusal(error: Exception) -> str:
    """Return the database's error message without its details, which quote values."""
    cause, sqlstate = _find_cause(error)
    diagnosis = getattr(cause, "diag", None)
    message = getattr(diagnosis, "message_primary", None) or type(error).__name__
    return f"{message} (SQLSTATE {sqlstate})" if sqlstate else str(message)


def _find_cause(error: Exception) -> tuple[BaseException | None, str | None]:
    """Return the driver's error and its SQLSTATE; None for both if the error did not come from the driver."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(cause, Exception) or isinstance(cause, SQLAlchemyError):
        return None, None
    return cause, getattr(cause, "sqlstate", None)


def _is_broken(error: Exception) -> bool:
    return isinstance(error, DBAPIError) and error.connection_invalidated
