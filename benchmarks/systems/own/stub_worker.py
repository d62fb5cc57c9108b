"""StubWorker: commits vectors that no model has made, as fast as Postgres takes them. For what is not encoding."""

import threading
from types import TracebackType
from typing import Final, Self

import numpy as np
from sqlalchemy import Engine, text

from benchmarks.systems.own.stored_job import complete_with_random_vectors

IDLE_SECONDS: Final = 0.005
# Straight from the table: no scheduler and no Redis are between.
FIND_PENDING: Final = text("""
    SELECT chunks.id, jobs.model FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = chunks.job_id
     WHERE chunks.state = 'pending' AND jobs.state IN ('queued', 'running') LIMIT 64
""")


class StubWorker:
    """On a thread of its own from the beginning of the block to its end. `num_items` counts what it has committed."""

    def __init__(self, engine: Engine) -> None:
        self.num_items = 0
        self._engine = engine
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stub worker", daemon=True)
        self._random = np.random.default_rng(0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._engine.connect() as connection:
                pending = connection.execute(FIND_PENDING).all()
            for chunk_id, model in pending:
                self.num_items += complete_with_random_vectors(self._engine, chunk_id, model, self._random)
            if not pending:
                self._stopping.wait(IDLE_SECONDS)
