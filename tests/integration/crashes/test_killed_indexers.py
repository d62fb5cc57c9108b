"""SIGKILL at every step of a run of re-indexing; then another indexer goes on, and nothing is encoded twice.

Which steps there are is found out by letting an indexer live. Real processes and Postgres.
"""

from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection as Pipe
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from indexer.phases import Tools, carry_out
from tests.api_server import encode_waiting
from tests.database import ask, execute
from tests.indexers import ListedSource, contents, look, start_run, wanted
from tests.integration.crashes.points import CrashPoints
from tests.integration.crashes.victims import Servers, running, watched_engine
from tests.kinds import RECORDS
from tests.protocol import SPEC, submit
from tests.work_users import CHANGED_ROWS, ROWS
from vectormill.db.session import make_engine
from vectormill.domain.encoding import EncodingSpec
from vectormill.models.registry import Registry
from vectormill.runs.differences import drop_left_stages
from vectormill.runs.run import RunCounts
from vectormill.runs.runs import claim_run
from vectormill.settings import Settings

LEASE_SECONDS = 30.0
COUNTS = RunCounts(
    num_seen=13, num_unchanged=8, num_metadata_only=1, num_new=2, num_changed=1, num_moved=1, num_deleted=1,
    num_failed=1,
)  # fmt: skip

EXPIRE = text("UPDATE vectormill.runs SET lease_until = now(), available_at = now() WHERE state = 'running'")
COUNT_ENCODED = text("""
    SELECT coalesce(sum(num_done + num_failed), 0) FROM vectormill.jobs
     WHERE metadata ->> 'run' = CAST(:run_id AS text)
""")
COUNT_STAGES = text("SELECT count(*) FROM pg_class WHERE relname ~ '^run_[0-9a-f]{32}_' AND relkind = 'r'")


def carry_out_next(engine: Engine, wait: Callable[[float], object]) -> None:
    """What an indexer does with the next run, in this thread."""
    claimed = ask(engine, claim_run, "an indexer", LEASE_SECONDS)
    assert claimed is not None
    settings = Settings(chunk_max_items=2)
    tools = Tools(engine, settings, Registry({}), lambda context: ListedSource(CHANGED_ROWS, batch=7), wait)
    carry_out(*claimed, tools, lambda: None)


def index_once(servers: Servers, points: CrashPoints, pipe: Pipe) -> None:
    """The indexer that dies. Workers are no steps of its own."""
    workers = make_engine(servers.database_url, application_name="workers", pool_size=1)
    carry_out_next(watched_engine(servers, points), lambda _: encode_waiting(workers))


def prepare(engine: Engine, number: int, spec: EncodingSpec) -> UUID:
    submit(engine, ROWS, collection=f"docs_{number}", spec=spec)
    encode_waiting(engine)
    return start_run(engine, f"docs_{number}")


# One of each phase that has something to do.
PHASE_STEPS = (
    "before COMPARE_BATCH",
    "before WRITE_MOVED",
    "before QUEUE_JOB",
    "before WRITE_ATTRIBUTES",
    "before NOTE_VANISHED",
    "before END_RUN",
)


def every(points: list[str]) -> Iterable[int]:
    return range(len(points))


def of_each_phase(points: list[str]) -> Iterable[int]:
    return sorted(map(points.index, PHASE_STEPS))


# Every step is some hundred processes that are killed, for minutes; tests/integration/work ends one at each step.
@pytest.mark.parametrize(
    ("choose", "spec"),
    [
        pytest.param(every, SPEC, marks=pytest.mark.slow, id="all"),
        pytest.param(of_each_phase, RECORDS, id="records, of each phase one"),
    ],
)
@pytest.mark.timeout(900)
def test_an_indexer_killed_at_any_step_leaves_its_run_to_another_which_encodes_nothing_twice(
    database_url: str, engine: Engine, choose: Callable[[list[str]], Iterable[int]], spec: EncodingSpec
) -> None:
    servers = Servers(database_url, "")

    def index(last: int | None, run_id: UUID) -> list[str]:
        with running(index_once, servers, last=last) as victim:
            return victim.hear_all()

    run_id = prepare(engine, 0, spec)
    points = index(None, run_id)
    check(engine, 0, run_id, "never")
    assert {
        "before COMPARE_BATCH",
        "before COPY_CHANGES",
        "before WRITE_MOVED",
        "before WRITE_ATTRIBUTES",
    } <= set(points)
    assert {"before QUEUE_JOB", "before LIST_FAILED_KEYS", "before NOTE_VANISHED", "before END_RUN"} <= set(
        points
    )
    for last in choose(points):
        number = last + 1
        run_id = prepare(engine, number, spec)
        reached = index(last, run_id)
        assert len(reached) == number
        if not look(engine, run_id).is_terminal:
            execute(engine, EXPIRE)
            carry_out_next(engine, lambda _: encode_waiting(engine))
        check(engine, number, run_id, f"{last} {reached[-1]}")


def check(engine: Engine, number: int, run_id: UUID, killed: str) -> None:
    run = look(engine, run_id)
    assert (run.state, run.error) == ("completed_with_errors", None), f"killed {killed}"
    assert run.counts == COUNTS, f"killed {killed}"
    assert contents(engine, f"docs_{number}") == wanted(CHANGED_ROWS[:-1]), f"killed {killed}"
    with engine.connect() as connection:
        drop_left_stages(engine)  # as every indexer does from time to time
        num_encoded = connection.execute(COUNT_ENCODED, {"run_id": str(run_id)}).scalar_one()
        assert num_encoded == 3, f"killed {killed}"
        assert connection.execute(COUNT_STAGES).scalar_one() == 0, f"killed {killed}"
