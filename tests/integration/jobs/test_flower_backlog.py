"""What Flower's page of the backlog is made of, out of a real Postgres."""

from sqlalchemy import Engine, text

from tests.protocol import SPEC, claim_next, make_items, submit
from tests.waiting import wait_for
from vectormill.flower_pages.backlog import BacklogReader

COUNT = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'vectormill flower'")


def test_a_look_tells_the_backlog_and_leaves_no_connection_behind(engine: Engine, database_url: str) -> None:
    submit(engine, make_items(12), priority=3)
    claim_next(engine)
    backlog = BacklogReader(database_url).read()
    assert backlog.reason == ""
    (row,) = backlog.rows
    assert (row.model, row.priority, row.num_items) == (SPEC.model, 3, 12)
    assert (row.num_pending_chunks + row.num_queued_chunks, row.num_leased_chunks) == (2, 1)
    assert row.oldest_seconds is not None

    def count_connections() -> int:
        with engine.connect() as connection:
            return int(connection.execute(COUNT).scalar_one())

    wait_for(lambda: count_connections() == 0, because="the connection of the look ends")
