"""Chunks of several jobs that write the same rows of a collection at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Engine, text

from tests.protocol import claim, complete, dispatch_all, submit
from tests.waiting import wait_for
from vectormill.jobs.item import Item

PATIENCE_SECONDS = 60.0
COUNT_BLOCKED = text("""
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
""")


def test_chunks_that_name_the_same_keys_in_other_orders_never_wait_for_each_other(engine: Engine) -> None:
    def new_job(order: str) -> None:
        submit(engine, [Item(key, f"{key} {order}".encode()) for key in order], collection="docs")

    def complete_all() -> list[bool]:
        claims = [claim(engine, dispatch.chunk_id) for dispatch in dispatch_all(engine)]
        with ThreadPoolExecutor(2) as workers:
            return [
                ended.result(PATIENCE_SECONDS)
                for ended in [workers.submit(complete, engine, c) for c in claims if c]
            ]

    new_job("abm")
    complete_all()
    # Both come to a halt at m: with the rows before it locked, in whichever order they were written.
    new_job("bma")
    new_job("amb")
    is_halted = threading.Event()

    def have_halted() -> bool:
        with (
            engine.connect() as connection
        ):  # anew: a transaction sees pg_stat_activity as it was at first sight
            return bool(connection.execute(COUNT_BLOCKED).scalar_one() == 2)

    def hold() -> None:
        with engine.begin() as connection:
            connection.execute(text("SELECT 1 FROM vectormill.generation_1 WHERE key = 'm' FOR UPDATE"))
            is_halted.set()
            wait_for(have_halted, PATIENCE_SECONDS, "both chunks wait")

    with ThreadPoolExecutor(1) as other:
        holder = other.submit(hold)
        assert is_halted.wait(PATIENCE_SECONDS)
        assert complete_all() == [True, True]
        holder.result()
