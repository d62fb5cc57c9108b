"""The follower rereads the changed rows of followed tables, and encodes or deletes them within seconds.

A change is deleted in the transaction that makes its effect durable, so that none is lost or applied twice if
a follower is killed. Any number of followers may run. Scheduled re-indexing remains the authority.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine

from vectormill.collections.collections import find_generation
from vectormill.collections.items import delete_items
from vectormill.db.outages import DATABASE_ERRORS
from vectormill.db.session import make_engine
from vectormill.domain.errors import Conflict, VectormillError
from vectormill.jobs.job import INTERACTIVE_PRIORITY, NewJob
from vectormill.jobs.submission import JobWriter
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.sources.following import (
    Changes,
    FollowedCollection,
    expand_truncation,
    find_followed_collection,
    forget_changes,
    list_changed_collections,
    list_changes,
    list_failed_jobs,
    list_passages,
    remove_changes,
    remove_failed,
    try_to_follow,
)
from vectormill.sources.opening import read_keys
from vectormill.sources.parsing import NONE, parse_split
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import Source
from vectormill.work.work import Loop

logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 1.0
# The most keys of one job, so that it is encoded within a second or two.
MAX_KEYS: Final = 512
# The most changes that are read for these keys, as one key may have changed many times.
MAX_CHANGES: Final = 10_000
# How long the next job waits for the previous one to end.
PATIENCE_SECONDS: Final = 60.0
# The pause after a failure; it doubles with each further one, up to a limit.
FIRST_BACKOFF_SECONDS: Final = 2.0
LAST_BACKOFF_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 5.0


@dataclass(slots=True)
class _Backoff:
    """The backoff of a collection after a failure: its length in seconds, and the time at which it ends."""

    seconds: float
    until: float


class Follower(Loop):
    """Follow tables in a thread, with separate connections, while the `with` block runs."""

    def __init__(
        self,
        database_url: str,
        settings: Settings,
        registry: Registry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("followed tables", pause_seconds=PAUSE_SECONDS, stop_seconds=_STOP_SECONDS)
        # One connection holds the follower's lock, one reads, and one writes.
        self._engine = make_engine(
            database_url, application_name="vectormill follower", pool_size=1, max_overflow=2
        )
        self._settings = settings
        self._registry = registry
        self._clock = clock
        self._backoffs: dict[int, _Backoff] = {}

    def close(self) -> None:
        self._engine.dispose()

    def step(self) -> bool:
        """Process pending changes of each collection once; return True if more may be pending."""
        with self._engine.connect() as connection:
            failed = list_failed_jobs(connection)
            changed = list_changed_collections(connection)
        for job in failed:
            try:
                with self._engine.begin() as connection:
                    num_removed = remove_failed(connection, job)
            except DATABASE_ERRORS as error:
                logger.warning("The old rows of job %s stay until the next round: %s", job.id, error)
                continue
            logger.warning(
                "Some rows of a followed table could not be encoded; %d old vectors were removed. See job %s.",
                num_removed,
                job.id,
            )
        has_more = False
        for collection_id in changed:
            backoff = self._backoffs.get(collection_id)
            if self.stopping.is_set() or (backoff is not None and self._clock() < backoff.until):
                continue
            try:
                has_more |= follow_collection(self._engine, self._settings, self._registry, collection_id)
                self._backoffs.pop(collection_id, None)
            except (VectormillError, *DATABASE_ERRORS) as error:
                seconds = min(2 * backoff.seconds if backoff else FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
                self._backoffs[collection_id] = _Backoff(seconds, self._clock() + seconds)
                logger.warning("Collection %s: changes are waiting; retrying: %s", collection_id, error)
        return has_more


def follow_collection(engine: Engine, settings: Settings, registry: Registry, collection_id: int) -> bool:
    """Apply some pending changes of a collection; return True if more may be pending.

    Raise SourceFailed, or an error of the job's submission; the changes then stay pending.
    """
    with engine.connect() as holding, holding.begin():
        if not try_to_follow(holding, collection_id):
            return False
        collection = find_followed_collection(holding, collection_id, PATIENCE_SECONDS)
        if collection is None or collection.source is None or not collection.source.is_own_query:
            # They come from triggers that are still there because only the table's owner can drop them.
            with engine.begin() as connection:
                num_changes = forget_changes(connection, collection_id)
            logger.info("Removed %d changes that no collection follows any more.", num_changes)
            return False
        if collection.is_busy:
            return False
        changes = list_changes(holding, collection_id, max_keys=MAX_KEYS, limit=MAX_CHANGES)
        if changes.is_whole:  # the table was truncated: later rounds look up each key
            with engine.begin() as connection:
                expand_truncation(connection, collection, changes)
            return True
        if not changes.ids:
            return False
        try:
            return _apply(engine, settings, registry, collection, collection.source, changes)
        except Conflict as error:
            logger.info("Collection %s: nothing of this round was stored: %s", collection.name, error)
            return False


def _apply(
    engine: Engine,
    settings: Settings,
    registry: Registry,
    collection: FollowedCollection,
    source: Source,
    changes: Changes,
) -> bool:
    with engine.connect() as connection:
        spec = find_generation(connection, collection.name).spec
    place = SourcePlace(engine, settings, registry, collection=collection.name, spec=spec)
    items = read_keys(source, place, changes.keys)
    is_split = parse_split(source).by != NONE

    def settle(connection: Connection) -> None:
        remove_changes(connection, changes.ids)
        there = {item.key for item in items}
        # A document of a single passage has a row `key#0` too.
        had = list_passages(connection, collection.name, changes.keys) if is_split else set(changes.keys)
        if had - there:
            delete_items(connection, collection.name, had - there)

    if not items:
        with engine.begin() as connection:
            settle(connection)
        return True
    # The job is deleted when it has ended, as is that of a put, because there may be one per second.
    new_job = NewJob(
        spec,
        collection=collection.name,
        priority=INTERACTIVE_PRIORITY,
        metadata={"changes_of": collection.name},
        lifetime_seconds=float("inf"),
    )
    with JobWriter(engine, new_job, settings) as writer:
        for item in items:
            writer.add(item)
        writer.finish(lambda connection, _: settle(connection))
    return False
