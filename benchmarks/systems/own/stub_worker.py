"""StubWorker: commits vectors that no model has made, as fast as Postgres takes them. For what is not encoding."""

from typing import Final

import numpy as np
from sqlalchemy import Engine, text

from benchmarks.probes.alongside import Alongside
from benchmarks.systems.own.stored_job import complete_with_random_vectors

IDLE_SECONDS: Final = 0.005
# Straight from the table: no scheduler and no Redis are between.
FIND_PENDING: Final = text("""
    SELECT chunks.id, jobs.model FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = chunks.job_id
     WHERE chunks.state = 'pending' AND jobs.state IN ('queued', 'running') LIMIT 64
""")


class StubWorker(Alongside):
    """On a thread of its own from the beginning of the block to its end. `num_items` counts what it has committed."""

    def __init__(self, engine: Engine) -> None:
        super().__init__("stub worker")
        self.num_items = 0
        self._engine = engine
        self._random = np.random.default_rng(0)

    def run(self) -> None:
        while not self.is_over.is_set():
            with self._engine.connect() as connection:
                pending = connection.execute(FIND_PENDING).all()
            for chunk_id, model in pending:
                self.num_items += complete_with_random_vectors(self._engine, chunk_id, model, self._random)
            if not pending:
                self.is_over.wait(IDLE_SECONDS)
