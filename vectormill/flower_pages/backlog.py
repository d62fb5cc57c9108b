"""BacklogReader: queue depth and oldest age out of Postgres, for whoever looks at Flower. Knows no pages.

Celery's queues in Redis hold a window of a few chunks; what waits stands in Postgres.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vectormill.db.jobs.backlog import Waiting

# Several people who look at once are told the same.
KEPT_SECONDS: Final = 2.0
READ_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """`reason` says why there are no figures, if so."""

    rows: Sequence["Waiting"] = ()
    reason: str = ""


class BacklogReader:
    """Opens a connection for a look and closes it: nearly always nobody looks. May be called by many threads."""

    def __init__(self, database_url: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._database_url = database_url
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: Backlog | None = None
        self._read_at = 0.0

    def read(self) -> Backlog:
        if self._database_url is None:
            return Backlog(
                reason="Set VECTORMILL_DATABASE_URL for Flower to tell the backlog, which is in Postgres."
            )
        with self._lock:
            if self._latest is None or self._clock() - self._read_at > KEPT_SECONDS:
                self._latest, self._read_at = _read(self._database_url), self._clock()
            return self._latest


def _read(database_url: str) -> Backlog:
    # Only now: until somebody looks, Flower does without SQLAlchemy and its 20 MiB.
    from sqlalchemy.exc import SQLAlchemyError

    from vectormill.db.jobs.backlog import list_waiting
    from vectormill.db.session import make_engine
    from vectormill.db.short_locks import limit_time

    engine = make_engine(database_url, application_name="vectormill flower", pool_size=1, max_overflow=0)
    try:
        with engine.begin() as connection:
            limit_time(connection, READ_SECONDS)
            return Backlog(list_waiting(connection))
    except SQLAlchemyError as error:
        return Backlog(reason=f"Postgres did not answer: {type(error).__name__}. Reload to try again.")
    finally:
        engine.dispose()
