"""Interruptions: whether a database that could not be read to the end is worth another reading."""

import psycopg
from sqlalchemy.exc import DBAPIError

from vectormill.db.outages import is_outage
from vectormill.domain.errors import SourceFailed, SourceInterrupted


def describe_database_error(what: str, error: Exception) -> SourceFailed:
    """Make the error of a source that our own Postgres was asked for: SourceInterrupted where it passes."""
    words = " ".join(str(getattr(error, "orig", error)).split())
    return choose_failure(error)(f"{what} cannot be read: {words.rstrip('.')}.")


def choose_failure(error: Exception) -> type[SourceFailed]:
    """Choose SourceInterrupted for what may pass. Only of Postgres is more known than whether the connection broke."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    is_known = isinstance(cause, psycopg.Error) or not isinstance(error, DBAPIError)
    passes = is_outage(error) if is_known else getattr(error, "connection_invalidated", False)
    return SourceInterrupted if passes else SourceFailed
