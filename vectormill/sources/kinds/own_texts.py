"""Own texts: those that the collection itself keeps, for a build of a new generation. Nothing of them is split."""

from collections.abc import Iterator
from typing import Final

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from vectormill.domain.errors import SourceFailed
from vectormill.domain.jobs.item import Item
from vectormill.sources.reader import BatchSize, Complaints, SourcePlace
from vectormill.sources.rows import Assembler

FIND_COLLECTION = text("""
    SELECT generations.id, collections.keep_text
      FROM vectormill.collections
      JOIN vectormill.generations ON generations.collection_id = collections.id AND generations.state = 'live'
     WHERE collections.name = :name
""")

# Page by page in the order of the primary key: no transaction stays open while what was read is used.
READ_PAGE = """
    SELECT rows.key, attributes.text, attributes.metadata
      FROM vectormill.generation_{id} AS rows
      LEFT JOIN vectormill.generation_{id}_attributes AS attributes ON attributes.key = rows.key
     WHERE rows.key > :after
     ORDER BY rows.key
     LIMIT :limit
"""

COUNT_ROWS = text("""
    SELECT reltuples::bigint FROM pg_class WHERE oid = to_regclass(:name)
""")


class OwnTextReader:
    """Reads the live generation. Raises SourceFailed when texts are not kept, or one of them is missing."""

    # What a client puts while pages are read may be missed: it comes into the new generation by a job of its own. And
    # what clients delete is deleted there too.
    tells_what_vanished: Final = False

    def __init__(self, place: SourcePlace) -> None:
        self._place = place
        self.complaints = Complaints()

    def read(self) -> Iterator[list[Item]]:
        name = f"Collection {self._place.collection!r}"
        assembler = Assembler(name, self._place.settings.max_key_bytes, self.complaints)
        size, after = BatchSize(), ""
        try:
            with self._place.engine.connect() as connection:
                page = text(READ_PAGE.format(id=self._find_generation(connection)))
            while True:
                with self._place.engine.connect() as connection:
                    rows = connection.execute(page, {"after": after, "limit": size.rows}).all()
                if not rows:
                    return
                keys, texts, metadata = zip(*rows, strict=True)
                if None in texts:
                    key = keys[texts.index(None)]
                    raise SourceFailed(
                        f"{name} has no text of {key!r}, which was written before it kept texts; read them once from "
                        "their source."
                    )
                after = keys[-1]
                items = assembler.assemble(keys, texts, metadata)
                size.learn(items)
                yield items
        except SQLAlchemyError as error:
            words = " ".join(str(getattr(error, "orig", error)).split())
            raise SourceFailed(f"{name} cannot be read: {words.rstrip('.')}.") from error

    def count_rows(self) -> int | None:
        with self._place.engine.connect() as connection:
            name = f"vectormill.generation_{self._find_generation(connection)}"
            estimate = connection.execute(COUNT_ROWS, {"name": name}).scalar_one()
        return None if estimate is None or estimate < 0 else int(estimate)

    def _find_generation(self, connection: Connection) -> int:
        row = connection.execute(FIND_COLLECTION, {"name": self._place.collection}).one_or_none()
        if row is None:
            raise SourceFailed(
                f"There is no collection {self._place.collection!r} whose texts could be read."
            )
        if not row.keep_text:
            raise SourceFailed(
                f"Collection {self._place.collection!r} does not keep its texts, so they cannot be read from it; name "
                "another source, or make the collection keep them."
            )
        return int(row.id)
