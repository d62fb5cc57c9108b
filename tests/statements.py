"""Observe every statement and COMMIT of the product before it is sent, under the name of its SQL constant.

A new constant in vectormill/db, or in the folder of a feature, is a new name by itself. Statements that
bypass SQLAlchemy (COPY, the staged upsert) are observed too, because the driver's connection is watched.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import psycopg
from psycopg import sql
from sqlalchemy import Engine, TextClause, create_engine, event

from tests.architecture.sources import FEATURES, ROOT
from vectormill.work.work import Work

COMMIT = "COMMIT"
# The step that is reported when Postgres aborts the transaction because of a deadlock.
DEADLOCK = "DEADLOCK"
WITH_SQL = ("vectormill/db", *FEATURES)
# The pool's checks of a connection before it hands it out; they are no steps of the product.
_PINGS = ("", ";", "SELECT 1")
_UNNAMED_WORDS = 6

Driver = psycopg.Connection[Any]


class Watcher(Protocol):
    """An observer of every step of every watched connection, called in the thread that takes the step."""

    def before(self, driver: Driver, step: str) -> None: ...

    def after_commit(self, driver: Driver) -> None: ...


DIALECT = create_engine("postgresql+psycopg://").dialect
# Statements that the package for leased work composes for each table, beside the constants of the features.
OF_THE_KERNEL = ("keeping", "renewal", "handing_back")


def pattern_of(statement: TextClause) -> re.Pattern[str]:
    return re.compile(re.escape(str(statement.compile(dialect=DIALECT)).strip()))


@cache
def named_patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    found = []
    modules = [
        module
        for folder in WITH_SQL
        for module in pkgutil.walk_packages([str(ROOT / folder)], f"{folder.replace('/', '.')}.")
    ]
    for module in modules:
        for name, constant in vars(importlib.import_module(module.name)).items():
            if isinstance(constant, Work):
                found += [
                    (pattern_of(getattr(constant, duty)), f"{duty} of {constant.row}")
                    for duty in OF_THE_KERNEL
                ]
            elif isinstance(constant, TextClause):
                found.append((pattern_of(constant), name))
            elif isinstance(constant, str) and name.isupper() and " " in constant:
                # A template: the parts in braces are filled in at run time.
                parts = re.split(r"\{\w+\}", constant.strip())
                found.append((re.compile(".*".join(re.escape(part) for part in parts), re.DOTALL), name))
    return tuple(found)


@cache
def name_statement(statement: str) -> str:
    """Return the name of the constant that the statement is made from, or else its first words."""
    statement = statement.strip()
    for pattern, name in named_patterns():
        if pattern.fullmatch(statement):
            return name
    words = re.sub(r"_\d+(?=_|\b)", "_N", statement).split()
    return " ".join(words[:_UNNAMED_WORDS])


class WatchedCursor(psycopg.Cursor[Any]):
    """A cursor that reports each statement to the watcher before it is sent."""

    def _announce(self, query: Any) -> None:
        connection = self.connection
        assert isinstance(connection, WatchedConnection)
        text = query.as_string(connection) if isinstance(query, sql.Composable) else query
        text = text.decode() if isinstance(text, bytes) else text
        if text.strip() not in _PINGS:
            connection.watcher.before(connection, name_statement(text))

    def execute(self, query: Any, *arguments: Any, **options: Any) -> "WatchedCursor":
        self._announce(query)
        try:
            return super().execute(query, *arguments, **options)
        except psycopg.errors.DeadlockDetected:
            connection = self.connection
            assert isinstance(connection, WatchedConnection)
            connection.watcher.before(connection, DEADLOCK)
            raise

    def executemany(self, query: Any, *arguments: Any, **options: Any) -> None:
        self._announce(query)
        super().executemany(query, *arguments, **options)

    @contextmanager
    def copy(self, statement: Any, *arguments: Any, **options: Any) -> Iterator[psycopg.Copy]:
        self._announce(statement)
        with super().copy(statement, *arguments, **options) as copy:
            yield copy


class WatchedConnection(psycopg.Connection[Any]):
    """A connection that reports each COMMIT to the watcher, before it is sent and after it was answered."""

    watcher: Watcher

    def commit(self) -> None:
        if self.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            super().commit()
            return
        self.watcher.before(self, COMMIT)
        super().commit()
        self.watcher.after_commit(self)


def watch(engine: Engine, watcher: Watcher) -> None:
    """Report every step on the engine's future connections to the watcher."""

    @event.listens_for(engine, "do_connect")
    def connect(dialect: object, record: object, arguments: Any, options: dict[str, Any]) -> Driver:
        connection = WatchedConnection.connect(*arguments, **options)
        connection.watcher = watcher
        connection.cursor_factory = WatchedCursor
        return connection
