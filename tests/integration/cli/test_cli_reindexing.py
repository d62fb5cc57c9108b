from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import make_url

from vectormill.cli.reindexing_demo import CHANGES, change_table, count_rows, make_table
from vectormill.corpus import Docstring

DOCSTRINGS = [Docstring(f"module{number % 7}.f{number}", f"Text {number}.") for number in range(4000)] + [
    Docstring(f"module{number % 7}.C{number}.f", f"Other text {number}.") for number in range(4000)
]


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    url = make_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def test_the_demo_makes_a_table_of_whatever_a_column_can_hold(connection: psycopg.Connection) -> None:
    assert make_table(connection, [*DOCSTRINGS, Docstring("odd", "a\0b")], None) == len(DOCSTRINGS)
    assert make_table(connection, DOCSTRINGS, None) == len(DOCSTRINGS)  # in place of the one that is there
    assert count_rows(connection, "library") == len(DOCSTRINGS)


def test_the_demo_changes_a_hundredth_of_its_table_in_every_way_there_is(
    connection: psycopg.Connection,
) -> None:
    make_table(connection, DOCSTRINGS, None)
    changes = change_table(connection)
    assert changes.keys() == CHANGES.keys()
    assert min(changes.values()) > 0
    assert 0.005 < sum(changes.values()) / len(DOCSTRINGS) < 0.02
    assert count_rows(connection, "library") == len(DOCSTRINGS) + changes["new"] - changes["deleted"]
