"""Exports: read a collection's rows by pages in the order of keys: results, metadata and kept texts.

Each page is its own transaction with keyset pagination: a slow reader does not hold back vacuum, and a client that lost
its connection resumes after the last key it received. All pages are of one generation, so that vector spaces are never
mixed if another generation becomes live meanwhile.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql
from sqlalchemy import Connection, Engine

from vectormill.collections.codebooks import open_kind
from vectormill.collections.collection import PRUNED, Generation
from vectormill.collections.collections import find_generation, find_generation_by_id
from vectormill.collections.generation_tables import attributes_name
from vectormill.db.session import driver_of
from vectormill.domain.errors import Conflict
from vectormill.results.kind import Results
from vectormill.results.table import choose_kind

# The size of a page, of which a few are in memory at once: read ahead, being formatted, being sent. Texts and metadata
# count by their bytes; a page has at least one row.
PAGE_BYTES: Final = 1 << 20
MOST_PAGE_ROWS: Final = 2000


@dataclass(frozen=True, slots=True)
class Inclusion:
    """The parts of a row to export besides its key."""

    result: bool = True
    metadata: bool = True
    text: bool = False
    place: bool = False


@dataclass(frozen=True, slots=True)
class RowPage:
    """A page of n rows in the order of their keys. `results` [n, …] have the column's type; None if not included.

    `metadata` are JSON strings, and `texts` has a list per text column (two for pairs); the element is None for a row
    without metadata or kept text, and the list is empty if not included. `places` are the sequence numbers of the
    rows' last writers, or None.
    """

    keys: list[str]
    results: Results | None
    metadata: list[str | None]
    texts: dict[str, list[str | None]]
    places: list[int] | None = None


# Attributes are looked up row by row (LATERAL), since a plain join might scan the whole table for a page of a thousand
# rows. `running_bytes` ends a page of long texts or records early; lengths are read without detoasting the values.
READ_PAGE: Final = """
    SELECT array_agg(key) AS keys, {results} AS results, {metadata} AS metadata, {places} AS places, {texts}
      FROM (SELECT page.*, attributes.*, sum({row_bytes}) OVER (ORDER BY page.key) AS running_bytes,
                   row_number() OVER (ORDER BY page.key) AS place
              FROM (SELECT {columns} FROM {table}
                     WHERE key > %(after)s::text ORDER BY key LIMIT %(limit)s) AS page
              LEFT JOIN LATERAL (SELECT {attribute_columns} FROM {attributes} AS kept
                                  WHERE kept.key = page.key LIMIT 1) AS attributes ON true
             ORDER BY page.key) AS entry
     WHERE place = 1 OR running_bytes <= %(most_bytes)s::bigint
"""


def find_exported(connection: Connection, name: str, generation_id: int | None) -> Generation:
    """Return the live generation of a collection, or with `generation_id` the one that an export began with.

    Raise CollectionNotFound, and Conflict if that generation has been removed.
    """
    live = find_generation(connection, name)
    if generation_id is None or generation_id == live.id:
        return live
    begun = find_generation_by_id(connection, generation_id)
    if begun is None or begun.collection != name or begun.state == PRUNED:
        raise Conflict(
            f"Collection {name!r} no longer has generation {generation_id}; start the export again without it."
        )
    return begun


def read_pages(
    engine: Engine, generation: Generation, inclusion: Inclusion, *, after: str = "", limit: int | None = None
) -> Iterator[RowPage]:
    """Yield pages of the rows after the key `after`, at most `limit` rows, in constant memory.

    Raise Conflict if the generation is removed meanwhile: then the export is incomplete.
    """
    statement = compose_statement(generation, inclusion)
    row_bytes = 40 + (
        (choose_kind(generation.spec).row_bytes(generation.spec) or 0) if inclusion.result else 0
    )
    page_rows = max(1, min(MOST_PAGE_ROWS, PAGE_BYTES // row_bytes))

    def read(after: str, rest: int | None) -> RowPage:
        num_rows = page_rows if rest is None else min(page_rows, rest)
        values = {"after": after, "limit": num_rows, "most_bytes": PAGE_BYTES}
        with engine.connect() as connection:
            driver = driver_of(connection)
            kind = open_kind(driver, generation.spec)
            try:
                with driver.cursor(binary=True) as cursor:  # as text, a byte of a vector takes two digits
                    ((keys, wire, metadata, places, *texts),) = cursor.execute(statement, values).fetchall()
            except psycopg.errors.UndefinedTable as error:
                raise Conflict(
                    "The generation was removed during the export; start the export again."
                ) from error
        results = None
        if inclusion.result:
            results = kind.read(wire, generation.spec) if keys else kind.missing(0, generation.spec)
        own_texts = {
            column: own or [] for column, own in zip(generation.spec.text_columns, texts, strict=True)
        }
        return RowPage(keys or [], results, metadata or [], own_texts, places)

    # A thread reads one page ahead, so that Postgres and the network work while the caller formats.
    with ThreadPoolExecutor(1, thread_name_prefix="export") as reader:
        upcoming = reader.submit(read, after, limit)
        while (page := upcoming.result()).keys:
            limit = None if limit is None else limit - len(page.keys)
            if limit == 0:
                yield page
                return
            upcoming = reader.submit(read, page.keys[-1], limit)
            yield page


def compose_statement(generation: Generation, inclusion: Inclusion) -> sql.Composed:
    """Return the statement READ_PAGE for one generation, with NULL for the columns that are not included."""
    nothing, comma = sql.SQL("NULL"), sql.SQL(", ")
    kind, spec = choose_kind(generation.spec), generation.spec
    texts = [sql.Identifier(column) for column in spec.text_columns]
    columns = [sql.Identifier(column.name) for column in kind.columns(spec)] if inclusion.result else []
    sizes: list[sql.Composable] = [sql.SQL("coalesce(pg_column_size(attributes.metadata), 0)")]
    sizes += [sql.SQL("coalesce(octet_length(attributes.{}), 0)").format(name) for name in texts]
    if kind.row_bytes(spec) is None:
        sizes += [sql.SQL("coalesce(pg_column_size(page.{}), 0)").format(name) for name in columns]
    return sql.SQL(READ_PAGE).format(
        results=sql.SQL(kind.gathered(kind.sent(spec, "entry"))) if inclusion.result else nothing,
        metadata=sql.SQL("array_agg(metadata::text)") if inclusion.metadata else nothing,
        texts=comma.join(
            sql.SQL("array_agg({})").format(name) if inclusion.text else nothing for name in texts
        ),
        places=sql.SQL("array_agg(greatest(job_seq, described_seq))") if inclusion.place else nothing,
        row_bytes=sql.SQL(" + ").join(sizes),
        columns=comma.join([sql.Identifier("key"), sql.Identifier("job_seq"), *columns]),
        attribute_columns=comma.join(
            [
                sql.SQL("job_seq AS described_seq"),
                sql.SQL("metadata" if inclusion.metadata else "NULL::jsonb AS metadata"),
                *(name if inclusion.text else sql.SQL("NULL::text AS {}").format(name) for name in texts),
            ]
        ),
        table=sql.Identifier("vectormill", generation.table_name),
        attributes=sql.Identifier("vectormill", attributes_name(generation.id)),
    )
