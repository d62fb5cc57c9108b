"""A collection's rows in the order of their keys, a page at a time: vectors, metadata and kept texts.

A page is a transaction of its own, found by the key behind which it begins: a slow reader holds back no vacuum, and one
that lost its connection goes on behind the last key that it got. All pages are of one generation, so that two vector
spaces are never mixed when another becomes live meanwhile.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql
from sqlalchemy import Connection, Engine

from vectormill.db.collections.collections import find_generation
from vectormill.db.collections.generations import find_generation_by_id
from vectormill.db.rows.attributes import attributes_name
from vectormill.domain.collection import PRUNED, Generation
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import Conflict
from vectormill.vectors.vector_types import Rows, VectorType, choose_vector_type, missing_rows, read_columns

# Of a page, which exists a few times at once: read ahead, being written, on its way. Texts and metadata count with
# their own bytes; a page has one row at the least.
PAGE_BYTES: Final = 1 << 20
MOST_PAGE_ROWS: Final = 2000


@dataclass(frozen=True, slots=True)
class Inclusion:
    """What of a row is wanted beside its key."""

    vector: bool = True
    metadata: bool = True
    text: bool = False


@dataclass(frozen=True, slots=True)
class RowPage:
    """Rows [n] in the order of their keys. `vectors` [n, width] as they are kept, or None when they are not wanted.

    `metadata` is JSON as text, None for none, as a text that is not kept is None; empty lists when not wanted.
    """

    keys: list[str]
    vectors: Rows | None
    metadata: list[str | None]
    texts: list[str | None]


# Attributes are looked up by key, row by row: a join might read all of them for a page of a thousand. `running_bytes`
# ends a page of long texts early; their length is read without the texts.
READ_PAGE: Final = """
    SELECT array_agg(key) AS keys, {vectors} AS vectors, {metadata} AS metadata, {texts} AS texts
      FROM (SELECT page.key, page.embedding, attributes.metadata, attributes.text,
                   sum(coalesce(octet_length(attributes.text), 0) + coalesce(pg_column_size(attributes.metadata), 0))
                       OVER (ORDER BY page.key) AS running_bytes,
                   row_number() OVER (ORDER BY page.key) AS place
              FROM (SELECT key, embedding FROM {table}
                     WHERE key > %(after)s::text ORDER BY key LIMIT %(limit)s) AS page
              LEFT JOIN LATERAL (SELECT {attribute_columns} FROM {attributes} AS kept
                                  WHERE kept.key = page.key LIMIT 1) AS attributes ON true
             ORDER BY page.key) AS row
     WHERE place = 1 OR running_bytes <= %(most_bytes)s::bigint
"""


def find_exported(connection: Connection, name: str, generation_id: int | None) -> Generation:
    """The live generation of a collection, or the one that an export has begun with.

    Raises CollectionNotFound, and Conflict when that generation is gone.
    """
    live = find_generation(connection, name)
    if generation_id is None or generation_id == live.id:
        return live
    begun = find_generation_by_id(connection, generation_id)
    if begun is None or begun.collection != name or begun.state == PRUNED:
        raise Conflict(
            f"Collection {name!r} has no generation {generation_id} any more; begin the export anew, without one."
        )
    return begun


def read_pages(
    engine: Engine, generation: Generation, inclusion: Inclusion, *, after: str = "", limit: int | None = None
) -> Iterator[RowPage]:
    """Pages of all rows behind the key `after`, `limit` rows at the most; memory does not grow with their number.

    Raises Conflict when the generation is removed meanwhile: what came until then is not whole.
    """
    kind = choose_vector_type(generation.spec, in_collection=True)
    statement = compose_statement(generation, inclusion, kind)
    row_bytes = 40 + (kind.width(generation.spec.dimensions) * 2 if inclusion.vector else 0)
    page_rows = max(1, min(MOST_PAGE_ROWS, PAGE_BYTES // row_bytes))

    def read(after: str, rest: int | None) -> RowPage:
        num_rows = page_rows if rest is None else min(page_rows, rest)
        return read_page(engine, statement, generation.spec, kind, inclusion, after, num_rows)

    # One page ahead, on a thread of its own: Postgres and the socket work while the caller formats.
    with ThreadPoolExecutor(1, thread_name_prefix="export") as reader:
        upcoming = reader.submit(read, after, limit)
        while (page := upcoming.result()).keys:
            limit = None if limit is None else limit - len(page.keys)
            if limit == 0:
                yield page
                return
            upcoming = reader.submit(read, page.keys[-1], limit)
            yield page


def compose_statement(generation: Generation, inclusion: Inclusion, kind: VectorType) -> sql.Composed:
    """READ_PAGE for one generation; what is not wanted is not read."""
    nothing = sql.SQL("NULL")
    columns = [
        sql.SQL("metadata") if inclusion.metadata else sql.SQL("NULL::jsonb AS metadata"),
        sql.SQL("text") if inclusion.text else sql.SQL("NULL::text AS text"),
    ]
    send = sql.SQL("string_agg({}(embedding), '')").format(sql.Identifier(f"{kind.column}_send"))
    return sql.SQL(READ_PAGE).format(
        vectors=send if inclusion.vector else nothing,
        metadata=sql.SQL("array_agg(metadata::text)") if inclusion.metadata else nothing,
        texts=sql.SQL("array_agg(text)") if inclusion.text else nothing,
        attribute_columns=sql.SQL(", ").join(columns),
        table=sql.Identifier("vectormill", generation.table_name),
        attributes=sql.Identifier("vectormill", attributes_name(generation.id)),
    )


def read_page(
    engine: Engine,
    statement: sql.Composed,
    spec: EncodingSpec,
    kind: VectorType,
    inclusion: Inclusion,
    after: str,
    num_rows: int,
) -> RowPage:
    """At most so many rows behind `after`; without keys when there are none. Raises Conflict."""
    values = {"after": after, "limit": num_rows, "most_bytes": PAGE_BYTES}
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        try:
            with driver.cursor(binary=True) as cursor:  # as text, a byte of a vector would come as two digits
                ((keys, wire, metadata, texts),) = cursor.execute(statement, values).fetchall()
        except psycopg.errors.UndefinedTable as error:
            raise Conflict(
                "The generation was removed while it was exported; begin the export anew."
            ) from error
    vectors = None
    if inclusion.vector:
        vectors = (
            read_columns(wire, kind, spec.dimensions) if keys else missing_rows(0, kind, spec.dimensions)
        )
    return RowPage(keys or [], vectors, metadata or [], texts or [])
