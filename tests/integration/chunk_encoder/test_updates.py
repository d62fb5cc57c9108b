"""Rows that change all the time change in their own page: no index is touched, and vacuum has little to do."""

from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.protocol import SPEC, claim, dispatch_all, make_items, submit
from tests.waiting import wait_for
from vectormill.jobs.chunks import renew_leases
from vectormill.workers.samples import MOST_SAMPLES, RECENT, Sample, write_samples
from vectormill.workers.workers import beat_scheduler, beat_worker

COUNTS = text("""
    SELECT n_tup_upd AS updated, n_tup_hot_upd AS hot FROM pg_stat_user_tables
     WHERE schemaname = 'vectormill' AND relname = :table
""")
ROUNDS = 200


def count_updates(engine: Engine, table: str, at_least: int) -> Any:
    """The statistics of a table, once so many updates are in them: each session tells its own with some delay."""

    def find() -> Any:
        row = execute(engine, COUNTS, table=table).one()
        return row if row.updated >= at_least else None

    return wait_for(find, 60, "the updates are in the statistics")


def test_a_renewal_touches_no_index(engine: Engine) -> None:
    submit(engine, make_items(8), chunk_max_items=1)
    claims = [claim(engine, dispatch.chunk_id) for dispatch in dispatch_all(engine)]
    held = [claimed for claimed in claims if claimed is not None]
    engine.dispose()  # a session that ends tells its statistics at once
    before = count_updates(engine, "chunks", 2 * len(held))
    for _ in range(ROUNDS):
        assert len(ask(engine, renew_leases, held, 30)) == len(held)
    engine.dispose()
    after = count_updates(engine, "chunks", before.updated + ROUNDS * len(held))
    assert after.hot - before.hot > 0.95 * ROUNDS * len(held)


@pytest.mark.parametrize("table", ["workers", "heartbeats"])
def test_a_sign_of_life_touches_no_index(engine: Engine, table: str) -> None:
    incarnation = uuid4()
    for number in range(ROUNDS):
        recent = [Sample(float(ago), 1000.0 * (number + ago), 8000 + ago, ago) for ago in range(MOST_SAMPLES)]
        report = {"num_batches": number, RECENT: write_samples(recent)}
        ask(engine, beat_worker, "w", incarnation, SPEC.model, 4, report)
        ask(engine, beat_scheduler)
    engine.dispose()
    counts = count_updates(engine, table, ROUNDS - 1)
    assert counts.hot > 0.95 * (ROUNDS - 1)
