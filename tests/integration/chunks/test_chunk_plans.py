"""Statements that name a chunk by its id look at that chunk alone, whatever the planner believes of the others."""

from sqlalchemy import Engine, TextClause, text

from tests.protocol import claim, dispatch_all, make_items, submit
from vectormill.jobs.chunks import MARK_ALONE, RENEW_LEASES
from vectormill.jobs.transitions import COMMIT_CHUNK, RELEASE_CHUNK

NUM_LEASED = 300


def count_removed(engine: Engine, statement: TextClause, values: dict[str, object]) -> int:
    """Return the number of rows that the plan has read and not wanted."""
    with engine.connect() as connection:
        lines = connection.execute(text(f"EXPLAIN (ANALYZE) {statement.text}"), values).scalars().all()
        connection.rollback()
    return sum(int(line.split(":")[1]) for line in lines if "Rows Removed by" in line)


def test_a_chunk_under_its_fence_is_found_without_reading_other_leased_chunks(engine: Engine) -> None:
    submit(engine, make_items(NUM_LEASED), chunk_max_items=1)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE vectormill.chunks"))  # while no chunk is leased
    claims = [taken for each in dispatch_all(engine) if (taken := claim(engine, each.chunk_id)) is not None]
    last = claims[-1]
    named: dict[str, object] = {"chunk_id": last.chunk_id, "fence": last.fence}
    release = {"is_counted": True, "is_lost": False, "is_lapsed": False, "reason": "", "delay_seconds": 0.0}
    held = {"chunk_ids": [last.chunk_id], "fences": [last.fence], "lease_seconds": 30.0}
    for statement, values in (
        (COMMIT_CHUNK, {**named, "proof_id": None}),
        (RELEASE_CHUNK, {**named, **release}),
        (MARK_ALONE, named),
        (RENEW_LEASES, held),
    ):
        assert count_removed(engine, statement, values) == 0, statement.text
