"""Articles: a table of texts, as a user has one, in a Postgres that its indexes are to follow."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

import psycopg
from sqlalchemy import make_url

from benchmarks.texts import list_distinct_lines

TABLE: Final = "articles"
LANGUAGES: Final = ("en", "de", "fr", "it")

CREATE: Final = f"""
    CREATE TABLE {TABLE} (key text PRIMARY KEY, body text NOT NULL, lang text NOT NULL, year integer NOT NULL)
"""
COPY: Final = f"COPY {TABLE} (key, body, lang, year) FROM STDIN"

# Spread evenly over the table, other rows at each round; no text comes again.
CHANGE_TEXTS: Final = f"""
    UPDATE {TABLE} SET body = body || ' (revision ' || %(round)s::integer || ')'
     WHERE abs(hashtext(key)::bigint) %% %(every)s::integer = %(round)s::integer %% %(every)s::integer
"""
CHANGE_METADATA: Final = f"""
    UPDATE {TABLE} SET year = year + 1 WHERE key IN (SELECT key FROM {TABLE} ORDER BY hashtext(key) LIMIT %(count)s)
"""


class Articles:
    """`url` is that of a database as SQLAlchemy writes it."""

    def __init__(self, url: str) -> None:
        self.dsn = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)

    @contextmanager
    def _connect(self) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            yield connection

    def fill(self, num_rows: int) -> None:
        """Makes the table."""
        with self._connect() as connection:
            connection.execute(CREATE)
        self.insert(num_rows)

    def insert(self, num_rows: int, *, first: int = 0) -> None:
        """Real lines of text, of which no two are equal; those before `first` are there already."""
        with self._connect() as connection:
            with connection.cursor().copy(COPY) as copy:
                for number, item in enumerate(islice(list_distinct_lines(first + num_rows), first, None)):
                    copy.write_row((item["key"], item["text"], LANGUAGES[number % 4], 2000 + number % 25))
            connection.execute(f"ANALYZE {TABLE}")

    def change_texts(self, share: float, round: int) -> int:
        """Other texts in so great a share of the rows; how many."""
        with self._connect() as connection:
            return connection.execute(CHANGE_TEXTS, {"every": int(1 / share), "round": round}).rowcount

    def change_metadata(self, count: int) -> int:
        with self._connect() as connection:
            return connection.execute(CHANGE_METADATA, {"count": count}).rowcount
