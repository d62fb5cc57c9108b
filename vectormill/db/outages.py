"""Outage: what an error of the database means for whoever asked: waiting helps against some, against others nothing.

Source of the classes: PostgreSQL documentation, appendix A, error codes.
"""

from typing import Final

import psycopg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, TimeoutError

# 08 connection, 40 rollback, 53 out of resources, 57 operator intervention, 58 the system below Postgres.
PASSING_CLASSES: Final = frozenset({"08", "40", "53", "57", "58"})
# 55P03 lock timeout, 25006 read-only: a standby before it takes over; 25P03 we were silent too long in a transaction.
PASSING_STATES: Final = frozenset({"55P03", "25006", "25P03"})
# Postgres answered, and lacks disk, memory, files or time for the statement: the same may be so for ever.
SHORTAGE_CLASSES: Final = frozenset({"53", "58"})
STATEMENT_TIMEOUT: Final = "57014"
# 22 the value, 23 a constraint, 42 the statement, 54 a limit of Postgres: the same again gives the same again.
LASTING_CLASSES: Final = frozenset({"22", "23", "42", "54"})

# Classes of errors that a single value can be to blame for.
VALUE_CLASSES: Final = frozenset({"22", "54"})

# Values that the driver could not even send.
REFUSALS: Final = (psycopg.DataError, psycopg.ProgrammingError, psycopg.NotSupportedError)
# Errors that a transaction can raise: COPY and the staged upsert use the driver itself, whose errors SQLAlchemy does
# not wrap.
DATABASE_ERRORS: Final = (SQLAlchemyError, psycopg.Error)


def is_outage(error: Exception) -> bool:
    """Return whether a later attempt can help: the connection broke, a lock was not had, or a deadlock chose
    us.
    """
    if isinstance(error, TimeoutError):  # of the pool
        return True
    cause, sqlstate = _find_cause(error)
    if cause is None:
        return False
    if sqlstate is None:
        return _is_broken(error) or not isinstance(cause, REFUSALS)
    return _is_broken(error) or sqlstate[:2] in PASSING_CLASSES or sqlstate in PASSING_STATES


def is_shortage(error: Exception) -> bool:
    """Tell whether Postgres was there and lacked what the statement needs, so that waiting helps only perhaps."""
    _, sqlstate = _find_cause(error)
    return sqlstate is not None and (sqlstate[:2] in SHORTAGE_CLASSES or sqlstate == STATEMENT_TIMEOUT)


def is_lasting(error: Exception) -> bool:
    """Return whether the same statement will fail again, however often it is tried."""
    cause, sqlstate = _find_cause(error)
    if cause is None or _is_broken(error):
        return False
    return isinstance(cause, REFUSALS) if sqlstate is None else sqlstate[:2] in LASTING_CLASSES


def blames_a_value(error: Exception) -> bool:
    """Tell whether a lasting refusal may be one row's fault, so that the rows beside it can be stored without it."""
    cause, sqlstate = _find_cause(error)
    if not is_lasting(error):
        return False
    return isinstance(cause, psycopg.DataError) if sqlstate is None else sqlstate[:2] in VALUE_CLASSES


def describe_refusal(error: Exception) -> str:
    """Return the database's own sentence, without the values that it quotes in the others."""
    cause, sqlstate = _find_cause(error)
    diagnosis = getattr(cause, "diag", None)
    message = getattr(diagnosis, "message_primary", None) or type(error).__name__
    return f"{message} (SQLSTATE {sqlstate})" if sqlstate else str(message)


def _find_cause(error: Exception) -> tuple[BaseException | None, str | None]:
    """Return the driver's error and its SQLSTATE; None when the database was not asked."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(cause, Exception) or isinstance(cause, SQLAlchemyError):
        return None, None
    return cause, getattr(cause, "sqlstate", None)


def _is_broken(error: Exception) -> bool:
    return isinstance(error, DBAPIError) and error.connection_invalidated
