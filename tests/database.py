"""Statements and functions of the product in tests, each in a transaction of its own."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, Executable, Result, text

from vectormill.jobs.chunk import load_blob, open_payload
from vectormill.jobs.item import Items

P = ParamSpec("P")
T = TypeVar("T")


def ask(
    engine: Engine, act: Callable[Concatenate[Connection, P], T], *arguments: P.args, **options: P.kwargs
) -> T:
    """Return the result of `act`, called with a connection in a transaction of its own."""
    with engine.begin() as connection:
        return act(connection, *arguments, **options)


def execute(engine: Engine, statement: str | Executable, **values: Any) -> Result[*tuple[Any, ...]]:
    """Execute a statement in a transaction of its own; its rows can be read afterwards."""
    with engine.begin() as connection:
        result = connection.execute(text(statement) if isinstance(statement, str) else statement, values)
        return result.freeze()() if result.returns_rows else result


def load_payload(connection: Connection, chunk_id: int) -> Items:
    """Return the items of a chunk, as its worker reads them."""
    blob, places = load_blob(connection, chunk_id)
    return open_payload(blob, chunk_id, places)
