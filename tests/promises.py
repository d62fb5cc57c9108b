"""Invariants of jobs, chunks and vectors, checked after every COMMIT (Witness) and when all work is done.

The checks read only the tables, whoever wrote them, so the same ones serve tests of interleavings and of
crashes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import numpy as np
from sqlalchemy import Connection, Engine, text

from tests.protocol import vector_of
from vectormill.jobs.export import read_results
from vectormill.jobs.item import Item
from vectormill.jobs.job import CANCELLED, CANCELLING, TERMINAL_JOB_STATES
from vectormill.jobs.jobs import find_job, list_item_errors

JOBS = text("""
    SELECT jobs.id, jobs.seq, jobs.state, jobs.num_items, jobs.num_done, jobs.num_failed, jobs.num_chunks,
           jobs.num_open_chunks, jobs.finished_at, noted.num_chunks AS noted_chunks,
           noted.num_done + jobs.num_done AS all_done, noted.num_failed + jobs.num_failed AS all_failed,
           count(chunks.id) AS real_chunks,
           count(chunks.id) FILTER (WHERE chunks.state IN ('pending', 'queued', 'leased')) AS real_open_chunks,
           coalesce(sum(chunks.num_items) FILTER (WHERE chunks.state <> 'split'), 0) AS real_items,
           bool_and((chunks.state = 'leased') = (chunks.lease_owner IS NOT NULL)) AS leases_have_owners,
           (SELECT count(*) FROM vectormill.item_errors WHERE job_id = jobs.id) AS real_failed
      FROM vectormill.jobs LEFT JOIN vectormill.chunks ON chunks.job_id = jobs.id
     CROSS JOIN LATERAL (
           SELECT coalesce(sum(num_chunks), 0) AS num_chunks, coalesce(sum(num_done), 0) AS num_done,
                  coalesce(sum(num_failed), 0) AS num_failed
             FROM vectormill.job_increments WHERE job_id = jobs.id) AS noted
     WHERE jobs.state NOT IN ('uploading', 'deleting')
     GROUP BY jobs.id, noted.num_chunks, noted.num_done, noted.num_failed
""")
LIST_VIEWS = text("SELECT generations.id FROM vectormill.generations")
# The tombstones of the only collection in these tests.
LIST_BURIED = text("SELECT key, seq FROM vectormill.tombstones")
KEYS = "SELECT key, job_seq FROM vectormill.generation_{}"


@dataclass(slots=True)
class Witness:
    """A check of all invariants after every COMMIT that remembers the state after the last one.

    The actors fill in `acknowledged`, the jobs that a client was told of; `deletable`, the jobs that somebody
    asked to delete; and `retried`, how often each job was retried.
    """

    engine: Engine
    acknowledged: dict[UUID, Sequence[Item]] = field(default_factory=dict)
    deletable: set[UUID] = field(default_factory=set)
    retried: dict[UUID, int] = field(default_factory=dict)
    is_pruning: bool = False
    _last: dict[UUID, Any] = field(default_factory=dict)
    _last_keys: dict[tuple[int, str], int] = field(default_factory=dict)

    def look(self) -> None:
        with self.engine.connect() as connection:
            jobs = check_counters(connection)
            keys = _read_keys(connection)
            buried = {row.key: row.seq for row in connection.execute(LIST_BURIED)}
        for row in jobs.values():
            self._check_end(row)
        for job_id, last in self._last.items():
            if job_id not in jobs:
                is_past = last.finished_at is not None and self.is_pruning
                assert is_past or job_id in self.deletable, f"job {last.seq} vanished in state {last.state}"
        for job_id in self.acknowledged:
            is_known = job_id in jobs or job_id in self._last or job_id in self.deletable
            assert is_known, "an acknowledged job is not there"
        self._check_keys({row.seq: row for row in jobs.values()}, keys, buried)
        # A deleted job stays known, so that rows that it still writes are noticed.
        self._last |= jobs
        self._last_keys = keys

    def _check_end(self, row: Any) -> None:
        last = self._last.get(row.id)
        if last is None or last.finished_at is None or self.retried.get(row.id):
            return
        assert (row.state, row.finished_at, row.num_done) == (last.state, last.finished_at, last.num_done), (
            f"job {row.seq} had ended as {last.state} and went on"
        )

    def _check_keys(
        self, jobs: dict[int, Any], keys: dict[tuple[int, str], int], buried: dict[str, int]
    ) -> None:
        known = {row.seq: row for row in self._last.values()}
        for place, seq in keys.items():
            assert seq > buried.get(place[1], -1), f"{place[1]} was deleted, and job {seq} brought it back"
        for place, seq in self._last_keys.items():
            if buried.get(place[1], -1) > seq:
                continue
            assert keys.get(place, -1) >= seq, f"{place[1]} of job {seq} was overwritten by an older job's"
        for place, seq in keys.items():
            if self._last_keys.get(place) == seq or seq not in known:
                continue
            assert known[seq].state != CANCELLED, f"job {seq} was cancelled and wrote {place[1]}"
            # The current COMMIT belongs to one job, so it cannot have both deleted this job and written its
            # rows.
            assert seq in jobs, f"job {seq} was deleted and wrote {place[1]}"


def _read_keys(connection: Connection) -> dict[tuple[int, str], int]:
    found = {}
    for generation in connection.execute(LIST_VIEWS).scalars().all():
        for row in connection.execute(text(KEYS.format(int(generation)))):
            found[generation, row.key] = row.job_seq
    return found


def check_counters(connection: Connection) -> dict[UUID, Any]:
    """Check that the counters of every job are those of its chunks and errors, and return the jobs by id."""
    jobs = {row.id: row for row in connection.execute(JOBS)}
    for row in jobs.values():
        _check_counters(row)
    return jobs


def _check_counters(row: Any) -> None:
    said = f"job {row.seq}, {row.state}: {row._mapping}"
    assert row.num_open_chunks - row.noted_chunks == row.real_open_chunks, (
        f"open chunks do not add up: {said}"
    )
    assert row.num_chunks == row.real_chunks, f"chunks do not add up: {said}"
    assert row.num_items == row.real_items, f"the chunks' items do not add up: {said}"
    assert row.all_failed == row.real_failed, f"failed items do not add up: {said}"
    assert (row.finished_at is not None) == (row.num_open_chunks == 0), f"the end does not add up: {said}"
    assert (row.finished_at is not None) == (row.state in TERMINAL_JOB_STATES), (
        f"state and end differ: {said}"
    )
    assert row.leases_have_owners, f"a lease without an owner, or an owner without a lease: {said}"
    assert row.all_done + row.all_failed <= row.num_items, f"an item counts twice: {said}"
    if row.num_open_chunks == 0 and row.state != CANCELLED:
        assert row.num_done + row.num_failed == row.num_items, f"an item is not accounted for: {said}"


def check_items(engine: Engine, job_id: UUID, items: Sequence[Item], newer_keys: Iterable[str] = ()) -> None:
    """Check that an ended job has one vector of its own text or one error for every item.

    Items with `newer_keys` may have the vector of another job, which wrote the same key later.
    """
    with engine.connect() as connection:
        job = find_job(connection, job_id)
        errors = list_item_errors(connection, job_id, after=None, limit=1_000_000)
    assert job.is_terminal, f"job {job.seq} never ended: {job.state}"
    blocks = list(read_results(engine, job_id))
    assert [key for block in blocks for key in block.keys] == [item.key for item in items]
    failed, taken_over = {error.item for error in errors}, set(newer_keys)
    num_present, position = 0, 0
    for block in blocks:
        for vector, is_present in zip(block.results, block.present, strict=True):
            item = items[position]
            if is_present:
                np.testing.assert_allclose(vector, vector_of(item.text), atol=1e-3)
                num_present += 1
            elif item.key not in taken_over and job.state not in (CANCELLED, CANCELLING):
                assert position in failed, f"item {position} of job {job.seq} has neither vector nor error"
            assert not (is_present and position in failed and item.key not in taken_over), (
                f"item {position} of job {job.seq} has a vector and an error"
            )
            position += 1
    if not taken_over:
        assert num_present == job.num_done, (
            f"job {job.seq} has {num_present} vectors and counts {job.num_done}"
        )
