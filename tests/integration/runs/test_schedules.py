"""Due times become runs on a real Postgres: exactly one each, whoever looks, however often, and wherever it dies."""

import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text

from scheduler.main import fire_due_schedules
from tests.database import ask, execute
from tests.protocol import make_items, submit
from tests.schedules import list_runs, make_collection, make_due, make_schedule
from tests.services import connected_engine
from tests.statements import COMMIT, watch
from tests.waiting import run_together, wait_for
from vectormill.domain.errors import (
    CollectionNotFound,
    Conflict,
    InvalidOption,
    ScheduleNotFound,
    SourceNotFound,
)
from vectormill.schedules.schedule import NewSchedule, Schedule, next_due
from vectormill.schedules.schedules import (
    LIST_DUE_SCHEDULES,
    change_schedule,
    create_schedule,
    delete_schedule,
    find_schedule,
    fire_schedule,
    list_schedules,
    pause_schedule,
    resume_schedule,
    run_schedule_now,
)

END_RUN = text("""
    UPDATE vectormill.runs SET state = :state, error = :error, finished_at = now()
     WHERE id = (SELECT id FROM vectormill.runs WHERE state = 'queued' ORDER BY created_at LIMIT 1)
""")


YEARLY = "0 2 1 6 *"


@pytest.fixture
def docs(engine: Engine) -> Schedule:
    """A schedule of a collection with a source, due once a year, so that no test meets a due time of its own."""
    make_collection(engine, "docs")
    return make_schedule(engine, "docs", YEARLY, timezone="Europe/Berlin")


def test_nothing_runs_before_it_is_due(engine: Engine, docs: Schedule) -> None:
    assert docs.next_due_at == next_due(YEARLY, "Europe/Berlin", docs.now)
    assert fire_due_schedules(engine) == 0
    assert list_runs(engine) == []


def test_a_due_time_makes_one_run_and_the_next_is_after_now(engine: Engine, docs: Schedule) -> None:
    due_at = make_due(engine, "docs")
    assert [fire_due_schedules(engine) for _ in range(3)] == [1, 0, 0]
    (run,) = list_runs(engine, "docs")
    assert (run.kind, run.state, run.due_at, run.schedule_id) == ("reindex", "queued", due_at, docs.id)
    later = ask(engine, find_schedule, "docs")
    assert later.next_due_at == next_due(YEARLY, "Europe/Berlin", later.now)
    assert later.lag_seconds == 0.0


def test_of_five_missed_nights_one_run_is_made_for_the_last(engine: Engine, docs: Schedule) -> None:
    ask(engine, change_schedule, "docs", cron="0 2 * * *")
    make_due(engine, "docs", timedelta(days=5))
    before = ask(engine, find_schedule, "docs")
    assert 5 * 86400 <= before.lag_seconds < 5 * 86400 + 60
    assert fire_due_schedules(engine) == 1
    (run,) = list_runs(engine)
    assert before.now - timedelta(days=1, hours=1) < run.due_at <= before.now
    assert next_due("0 2 * * *", "Europe/Berlin", run.due_at) > before.now


def test_three_schedulers_at_once_make_one_run_for_each_due_time(engine: Engine, database_url: str) -> None:
    names = [f"docs_{number}" for number in range(12)]
    for name in names:
        make_collection(engine, name)
        make_schedule(engine, name, YEARLY, overlap="queue")
    num_rounds = 3
    for number in range(num_rounds):
        due = {name: make_due(engine, name, timedelta(seconds=10 - number)) for name in names}
        together = threading.Barrier(3)
        fired: list[int] = []

        def schedule(together: threading.Barrier = together, fired: list[int] = fired) -> None:
            with connected_engine(database_url) as own:
                own.connect().close()
                together.wait()
                fired.append(sum(fire_due_schedules(own) for _ in range(3)))

        run_together(*3 * [schedule])
        assert sum(fired) == len(names)
        for name, moment in due.items():
            assert [run.due_at for run in list_runs(engine, name)].count(moment) == 1
        end_all = text("UPDATE vectormill.runs SET state = 'completed', finished_at = now()")
        execute(engine, end_all)
    assert len(list_runs(engine)) == num_rounds * len(names)


class Killed(BaseException):
    """Stands for SIGKILL: what the process had sent is all that there will be."""


class Killer:
    """Ends its connection, and with it everything that the transaction did, before one step or after its COMMIT."""

    def __init__(self, fatal_step: int) -> None:
        self._fatal_step = fatal_step
        self.steps: list[str] = []

    def _live_through(self, driver: psycopg.Connection[Any], step: str) -> None:
        self.steps.append(step)
        if len(self.steps) == self._fatal_step:
            driver.close()
            raise Killed

    def before(self, driver: psycopg.Connection[Any], step: str) -> None:
        self._live_through(driver, step)

    def after_commit(self, driver: psycopg.Connection[Any]) -> None:
        self._live_through(driver, "after COMMIT")


def fire_and_die(database_url: str, fatal_step: int) -> Iterator[str]:
    killer = Killer(fatal_step)
    with connected_engine(database_url) as own:
        watch(own, killer)
        try:
            fire_due_schedules(own)
        except Killed:
            own.dispose(close=False)
    yield from killer.steps


def test_a_scheduler_killed_at_any_step_neither_loses_nor_doubles_a_due_time(
    engine: Engine, docs: Schedule, database_url: str
) -> None:
    make_due(engine, "docs")
    steps = list(fire_and_die(database_url, 0))
    assert {"LOCK_DUE_SCHEDULE", "CREATE_RUN", "MOVE_DUE_TIME", COMMIT} <= set(steps)
    for fatal_step in range(1, len(steps) + 1):
        execute(engine, END_RUN, state="completed", error=None)
        due_at = make_due(engine, "docs", timedelta(seconds=fatal_step))
        assert len(list(fire_and_die(database_url, fatal_step))) == fatal_step
        # Postgres may not have noticed yet that the dead one's connection is gone; what it has locked is passed over.
        runs = wait_for(partial(fire_and_find, engine, due_at))
        assert [run.state for run in runs] == ["queued"], steps[:fatal_step]


def fire_and_find(engine: Engine, due_at: datetime) -> list[Any]:
    """What the next round of a scheduler leaves."""
    fire_due_schedules(engine)
    return [run for run in list_runs(engine) if run.due_at == due_at]


def test_what_overlaps_is_skipped_and_the_history_says_why(engine: Engine, docs: Schedule) -> None:
    make_due(engine, "docs", timedelta(seconds=1))
    fire_due_schedules(engine)
    make_due(engine, "docs")
    fire_due_schedules(engine)
    first, second = list_runs(engine)
    assert (first.state, second.state) == ("queued", "skipped")
    assert str(first.id) in second.error
    assert second.finished_at is not None
    assert ask(engine, find_schedule, "docs").num_skipped == 1


def test_a_run_that_waits_for_a_confirmation_overlaps_too(engine: Engine, docs: Schedule) -> None:
    make_due(engine, "docs", timedelta(seconds=1))
    fire_due_schedules(engine)
    execute(engine, "UPDATE vectormill.runs SET state = 'held'")
    make_due(engine, "docs")
    fire_due_schedules(engine)
    held, skipped = list_runs(engine)
    assert skipped.error is not None
    for said in (
        f"Run {held.id}",
        "was still held",
        f"vectormill runs confirm {held.id}",
        f"vectormill runs cancel {held.id}",
    ):
        assert said in skipped.error
    assert ask(engine, find_schedule, "docs").last_error == skipped.error


def test_what_overlaps_is_queued_when_so_chosen_but_no_two_wait(engine: Engine) -> None:
    make_collection(engine, "docs")
    make_schedule(engine, "docs", YEARLY, overlap="queue")
    make_due(engine, "docs", timedelta(seconds=2))
    fire_due_schedules(engine)
    execute(engine, "UPDATE vectormill.runs SET state = 'running'")
    for seconds in (1, 0):
        make_due(engine, "docs", timedelta(seconds=seconds))
        fire_due_schedules(engine)
    assert [run.state for run in list_runs(engine)] == ["running", "queued", "skipped"]
    assert "had not started" in list_runs(engine)[2].error


def test_a_paused_schedule_makes_no_run_and_resumed_none_for_what_it_missed(
    engine: Engine, docs: Schedule
) -> None:
    assert ask(engine, pause_schedule, "docs").paused_at is not None
    make_due(engine, "docs", timedelta(days=3))
    assert fire_due_schedules(engine) == 0
    assert ask(engine, find_schedule, "docs").lag_seconds == 0.0
    resumed = ask(engine, resume_schedule, "docs")
    assert resumed.paused_at is None
    assert resumed.next_due_at == next_due(YEARLY, "Europe/Berlin", resumed.now)
    assert fire_due_schedules(engine) == 0


def test_a_schedule_that_is_paused_after_it_was_found_due_makes_no_run(
    engine: Engine, docs: Schedule
) -> None:
    make_due(engine, "docs")
    (due,) = execute(engine, "SELECT id FROM vectormill.schedules").scalars()
    ask(engine, pause_schedule, "docs")
    assert ask(engine, fire_schedule, due) is None


def test_to_resume_what_is_not_paused_loses_no_due_time(engine: Engine, docs: Schedule) -> None:
    make_due(engine, "docs")
    ask(engine, resume_schedule, "docs")
    assert fire_due_schedules(engine) == 1


def test_a_run_now_needs_no_due_time_and_moves_none(engine: Engine, docs: Schedule) -> None:
    ids = {ask(engine, run_schedule_now, "docs") for _ in range(2)}
    assert {run.id for run in list_runs(engine, "docs")} == ids
    assert {run.due_at for run in list_runs(engine)} == {None}
    assert ask(engine, find_schedule, "docs").next_due_at == docs.next_due_at


def test_successes_and_failures_are_counted_since_the_last_success(engine: Engine, docs: Schedule) -> None:
    for seconds, state, error in (
        (9, "failed", "before"),
        (8, "completed_with_errors", None),
        (7, "failed", "no table"),
        (6, "cancelled", None),
        (5, "failed", "no such host"),
    ):
        make_due(engine, "docs", timedelta(seconds=seconds))
        fire_due_schedules(engine)
        execute(engine, END_RUN, state=state, error=error)
    found = ask(engine, find_schedule, "docs")
    assert (found.num_failures, found.num_skipped) == (2, 0)
    assert (found.last_state, found.last_error) == ("failed", "no such host")
    assert found.last_success_at is not None
    make_due(engine, "docs")
    fire_due_schedules(engine)
    execute(engine, END_RUN, state="completed", error=None)
    found = ask(engine, find_schedule, "docs")
    assert (found.num_failures, found.last_error, found.last_state) == (0, None, "completed")


def test_a_changed_expression_is_due_by_its_new_one(engine: Engine, docs: Schedule) -> None:
    changed = ask(engine, change_schedule, "docs", cron="30 4 * * *", timezone="UTC", overlap="queue")
    assert changed.next_due_at == next_due("30 4 * * *", "UTC", changed.now)
    again = ask(engine, change_schedule, "docs", overlap="skip")
    assert (again.next_due_at, again.overlap) == (changed.next_due_at, "skip")


def test_a_deleted_schedule_leaves_its_runs(engine: Engine, docs: Schedule) -> None:
    make_due(engine, "docs")
    fire_due_schedules(engine)
    ask(engine, delete_schedule, "docs")
    (run,) = list_runs(engine)
    assert run.schedule_id is None
    for act in (delete_schedule, find_schedule, pause_schedule, resume_schedule, run_schedule_now):
        with engine.begin() as connection, pytest.raises(ScheduleNotFound):
            act(connection, "docs")


def test_a_zone_that_this_machine_does_not_have_is_a_failed_run_and_stops_no_other(
    engine: Engine, docs: Schedule
) -> None:
    make_collection(engine, "other")
    make_schedule(engine, "other")
    execute(engine, "UPDATE vectormill.schedules SET timezone = 'Mars/Olympus' WHERE name = 'docs'")
    make_due(engine, "docs", timedelta(seconds=5))
    make_due(engine, "other")
    assert fire_due_schedules(engine) == 2
    (run,) = list_runs(engine, "docs")
    assert (run.state, "Unknown time zone 'Mars/Olympus'" in run.error) == ("failed", True)
    assert fire_due_schedules(engine) == 0  # and not again in a second


def test_while_a_collection_is_being_deleted_its_schedule_is_passed_over(
    engine: Engine, docs: Schedule
) -> None:
    make_due(engine, "docs")
    with engine.connect() as deleting:
        deleting.execute(text("SELECT 1 FROM vectormill.collections WHERE name = 'docs' FOR UPDATE"))
        assert fire_due_schedules(engine) == 0
    assert fire_due_schedules(engine) == 1


def test_what_could_never_run_is_refused(engine: Engine, docs: Schedule) -> None:
    make_collection(engine, "pushed", "push")
    submit(engine, make_items(1), collection="sourceless")
    cases: list[tuple[NewSchedule, type[Exception]]] = [
        (NewSchedule("a b", "docs", "0 2 * * *"), InvalidOption),
        (NewSchedule("a", "docs", "0 2 * *"), InvalidOption),
        (NewSchedule("a", "docs", "0 2 * * *", "Mars/Olympus"), InvalidOption),
        (NewSchedule("a", "docs", "0 2 * * *", overlap="perhaps"), InvalidOption),
        (NewSchedule("a", "nothing", "0 2 * * *"), CollectionNotFound),
        (NewSchedule("a", "sourceless", "0 2 * * *"), SourceNotFound),
        (NewSchedule("a", "pushed", "0 2 * * *"), InvalidOption),
        (NewSchedule("docs", "docs", "0 2 * * *"), Conflict),
    ]
    for new, error in cases:
        with engine.begin() as connection, pytest.raises(error):
            create_schedule(connection, new)


def test_schedules_are_listed_in_pages(engine: Engine, docs: Schedule) -> None:
    for name in ("nightly", "b"):
        make_schedule(engine, name, collection="docs")
    with engine.connect() as connection:
        first = list_schedules(connection, limit=2)
        assert [found.name for found in first] == ["docs", "nightly"]
        assert [found.name for found in list_schedules(connection, after=first[-1].id)] == ["b"]


FILL = text("""
    INSERT INTO vectormill.schedules (name, collection_id, cron, timezone, overlap, next_due_at)
    SELECT 's' || number, (SELECT min(id) FROM vectormill.collections), '0 2 * * *', 'UTC', 'skip',
           now() + make_interval(mins => number)
      FROM generate_series(1, 20000) AS number
""")


def test_what_is_due_is_found_by_its_index_among_many(engine: Engine, docs: Schedule) -> None:
    execute(engine, FILL)
    execute(engine, "ANALYZE vectormill.schedules")
    plan = "\n".join(execute(engine, f"EXPLAIN {LIST_DUE_SCHEDULES.text}").scalars())
    assert "ix_schedules_next_due_at" in plan
    assert "Seq Scan" not in plan
