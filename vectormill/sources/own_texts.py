"""Readers of the texts that a collection itself keeps, for a new generation or after a rollback.

Kept texts are those of rows, so they are not split again. Each row keeps its place in the order of writers (a
number of the sequence jobs.seq), because copying a row to another generation does not make it newer.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from sqlalchemy import Connection

from vectormill.collections.collection import LIVE, Generation
from vectormill.collections.collections import find_in_state, keeps_texts
from vectormill.collections.exports import Inclusion, RowPage, find_exported, read_pages
from vectormill.collections.generation_tables import estimate_num_rows
from vectormill.db.outages import DATABASE_ERRORS
from vectormill.domain.encoding import LATE
from vectormill.domain.errors import Conflict, SourceFailed
from vectormill.jobs.item import PASSAGE, Items
from vectormill.sources.reader import Reader, SourceAssembler, SourcePlace, describe_database_error

WITHOUT_VECTORS: Final = Inclusion(result=False, text=True, place=True)


class KeptTextReader(Reader):
    """Read kept texts of one generation. Subclasses choose the generation and which of its rows to read."""

    # An item that a client puts while pages are read may be missed here, but a separate job writes it to
    # the new generation. Deletions by clients are applied to the new generation too.
    tells_what_vanished = False

    def __init__(self, place: SourcePlace, gone: str) -> None:
        super().__init__()
        self._place = place
        self._name = f"Collection {place.collection!r}"
        self._gone = gone

    def read(self) -> Iterator[Items]:
        assembler = SourceAssembler(self._name, self._place.settings.max_key_bytes, self.complaints)
        try:
            with self._place.engine.connect() as connection:
                generation = self._find_generation(connection)
            spec = self._place.find_spec()
            for page in read_pages(self._place.engine, generation, WITHOUT_VECTORS):
                places = dict(zip(page.keys, page.places or [], strict=True))
                rows = self._choose_rows(page)
                pairs = rows.texts.get("text_pair") if spec is None or spec.reads_pairs else None
                is_late = spec is not None and spec.long_texts == LATE and pairs is None
                if is_late and any(f'"{PASSAGE}": ' in (metadata or "") for metadata in rows.metadata):
                    raise SourceFailed(
                        f"{self._name} keeps passages without their texts, which late chunking reads; use their source."
                    )
                items = assembler.assemble(rows.keys, rows.texts["text"], rows.metadata, pairs)
                yield replace(items, places=[places[key] for key in items.keys])
        except Conflict as error:
            raise SourceFailed(self._gone) from error
        except DATABASE_ERRORS as error:
            raise describe_database_error(self._name, error) from error

    def _find_generation(self, connection: Connection) -> Generation:
        raise NotImplementedError

    def _choose_rows(self, page: RowPage) -> RowPage:
        """Return a page with only the rows that are to be read, each of which has a kept text."""
        raise NotImplementedError


class OwnTextReader(KeptTextReader):
    """Read all texts of the live generation. Raise SourceFailed if any of them was not kept."""

    def __init__(self, place: SourcePlace) -> None:
        name = f"Collection {place.collection!r}"
        super().__init__(place, f"{name} was deleted or got a new generation while it was being read.")

    def count_rows(self) -> int | None:
        with self._place.engine.connect() as connection:
            return estimate_num_rows(connection, self._find_generation(connection).table_name)

    def _choose_rows(self, page: RowPage) -> RowPage:
        texts = page.texts["text"]
        if None in texts:
            key = page.keys[texts.index(None)]
            raise SourceFailed(
                f"{self._name} has no text for {key!r}, which was written before the collection stored texts; read the "
                "texts once from their original source."
            )
        return page

    def _find_generation(self, connection: Connection) -> Generation:
        generation = find_in_state(connection, self._place.collection, LIVE)
        if generation is None:
            raise SourceFailed(f"There is no collection {self._place.collection!r} to read texts from.")
        if not keeps_texts(connection, generation.collection_id):
            raise SourceFailed(
                f"{self._name} does not store its texts, so they cannot be read from it; use another source, or "
                "configure the collection to store them."
            )
        return generation


class CarriedTextReader(KeptTextReader):
    """Read the rows that were written to a generation after a given place in the order of writers.

    Used after a rollback to the generation before it. Later deletions have been applied to both generations.
    Rows without a kept text are skipped and counted; the answer to the rollback has announced this.
    """

    def __init__(self, place: SourcePlace, generation_id: int, since_seq: int) -> None:
        collection = f"collection {place.collection!r}"
        super().__init__(
            place,
            f"Generation {generation_id} of {collection} was removed before all of its rows were carried over.",
        )
        self._generation_id = generation_id
        self._since_seq = since_seq

    def _find_generation(self, connection: Connection) -> Generation:
        return find_exported(connection, self._place.collection, self._generation_id)

    def _choose_rows(self, page: RowPage) -> RowPage:
        newer = [number for number, place in enumerate(page.places or []) if place > self._since_seq]
        carried = [number for number in newer if page.texts["text"][number] is not None]
        self.complaints.num_left_out += len(newer) - len(carried)
        return replace(  # the page has no results
            page,
            keys=[page.keys[number] for number in carried],
            metadata=[page.metadata[number] for number in carried],
            texts={column: [values[number] for number in carried] for column, values in page.texts.items()},
            places=None,
        )
