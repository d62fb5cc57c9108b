"""DryRunWriter: takes what a JobWriter takes, checks it in the same way, and stores nothing; it ends with a quote."""

from collections.abc import Callable
from typing import Self
from uuid import UUID

from sqlalchemy import Connection, Engine

from vectormill.collections.collections import check_collection
from vectormill.domain.errors import DuplicateKey
from vectormill.jobs.chunk import LARGEST_CHUNK_TOKENS
from vectormill.jobs.duplicate_keys import DuplicateFinder
from vectormill.jobs.item import Items
from vectormill.jobs.job import NewJob
from vectormill.jobs.operations import QuoteBody
from vectormill.models.registry import Registry
from vectormill.objects.reference import ItemReference
from vectormill.quotes.quote import make_quote
from vectormill.quotes.sample import TextSample
from vectormill.settings import Settings


class DryRunWriter:
    """A trial of one job, used as a context manager. Not thread-safe.

    Entering checks the collection and calls `admit` as a JobWriter does. An output folder is not taken, and an
    Idempotency-Key is ignored.
    """

    existing: UUID | None = None
    next_chunk_tokens = LARGEST_CHUNK_TOKENS

    def __init__(
        self,
        engine: Engine,
        new_job: NewJob,
        settings: Settings,
        registry: Registry,
        admit: Callable[[Connection], object] = lambda _: None,
    ) -> None:
        self.sample = TextSample()
        self._engine = engine
        self._new_job = new_job
        self._settings = settings
        self._registry = registry
        self._admit = admit
        self._keys = DuplicateFinder()

    def __enter__(self) -> Self:
        with self._engine.begin() as connection:
            if self._new_job.collection is not None:
                check_collection(
                    connection, self._new_job.collection, self._new_job.spec, self._settings.max_collections
                )
            self._admit(connection)
        return self

    def __exit__(self, *_: object) -> None:
        self._keys.close()

    def add_content(self, content: bytes) -> None:
        """Ignore what only a repeated request is compared by."""

    def check(self) -> None:
        """Do nothing: there is no upload that could be taken for an abandoned one."""

    def compare_keys(self) -> None:
        """Do nothing: the keys of references were read with their texts."""

    def add_all(self, items: Items) -> None:
        self._keys.add_all(items.keys)
        self.sample.add_all(items)

    def add_reference(self, reference: ItemReference, num_tokens: int) -> None:
        """Read the rows of a reference. A job does not compare their keys unless it is told so."""
        self.sample.add_all(reference.read())

    def finish(self) -> QuoteBody:
        """Return the quote. Raise EmptyJob or DuplicateKey."""
        duplicate = self._keys.find_duplicate()
        if duplicate is not None:
            first, second = (place + 1 for place in duplicate)
            raise DuplicateKey(
                f"item {first} and item {second} have the same key; keys must be unique within a job."
            )
        card = self._registry.card(self._new_job.spec.model)
        with self._engine.connect() as connection:
            return make_quote(connection, card, self._new_job, self.sample)
