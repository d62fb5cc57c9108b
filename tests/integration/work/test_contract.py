"""The contract of leased work, by every table that takes part: nothing is lost, done twice, or held for ever.

Each user's own code carries its row out. Where it is killed, cancelled or loses a COMMIT, that is at each of its steps.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from tests.database import ask, execute
from tests.former import extract_release, former_process
from tests.work_users import USERS, ChunksToStorage, Claimed, Inputs, Outputs, Runs, User
from vectormill.db.session import make_engine
from vectormill.domain.errors import LeaseLost
from vectormill.work.work import back_off


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    # A run has so many steps that ending it at each of them takes minutes.
    is_long = "at_any_step" in name
    # The release before, the first migration's commit, knew nothing of object storage.
    is_former = "release_before" in name
    users = [
        pytest.param(
            user,
            marks=pytest.mark.slow if is_long and isinstance(user, Runs) else (),
            id=type(user).__name__,
        )
        for user in USERS
        if not (is_former and isinstance(user, ChunksToStorage | Outputs | Inputs))
    ]
    metafunc.parametrize("user", users)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep temporary files in the test's folder, which goes even if the process is killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def row_of(engine: Engine, user: User) -> Any:
    work = user.work
    statement = text(f"""
        SELECT id, state, fence, {work.attempt} AS attempt, lease_owner, lease_until,
               {work.available_at} AS available_at, now() AS asked_at
          FROM {work.table}
    """)
    return execute(engine, statement).one()


def state_of(engine: Engine, user: User) -> str:
    state: str = row_of(engine, user).state
    return state


def look(engine: Engine, user: User) -> tuple[Any, Any]:
    """All that is there, to be compared."""
    with engine.connect() as connection:
        rows = connection.execute(text(f"SELECT to_jsonb(one) FROM {user.work.table} AS one")).scalars().all()
        return rows, user.count_effects(connection)


def claim(engine: Engine, user: User, lease_seconds: float = 30) -> Claimed:
    claimed = ask(engine, user.claim, lease_seconds)
    assert claimed is not None
    return claimed


def is_free(engine: Engine, user: User) -> bool:
    """Whether anybody could claim the row; nobody has afterwards."""
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '1s'"))
        return user.claim(connection) is not None


def expire(engine: Engine, user: User) -> None:
    """As if leases and pauses were over."""
    make_available(engine, user, "now()")
    execute(engine, f"UPDATE {user.work.table} SET lease_until = now()")


def make_available(engine: Engine, user: User, moment: str) -> None:
    execute(engine, f"UPDATE {user.work.table} SET {user.work.available_at} = {moment}")


def clean(engine: Engine, user: User) -> None:
    with engine.begin() as connection:
        for table in user.tables:
            connection.execute(text(f"DELETE FROM vectormill.{table}"))


def undisturbed(engine: Engine, user: User) -> Any:
    """What the work leaves behind when nothing happens to it."""
    user.make(engine)
    user.finish(engine)
    assert state_of(engine, user) == user.done
    effects = look(engine, user)[1]
    clean(engine, user)
    return effects


@contextmanager
def stepping(database: Engine, at_step: Callable[[], None]) -> Iterator[Engine]:
    """An engine that tells of each statement and COMMIT before it is executed."""

    def step(*arguments: Any) -> None:
        at_step()

    engine = database.execution_options()
    event.listen(engine, "before_cursor_execute", step)
    event.listen(engine, "commit", step)
    try:
        yield engine
    finally:
        event.remove(engine, "before_cursor_execute", step)
        event.remove(engine, "commit", step)


def test_a_claim_raises_fence_and_attempt_and_holds_the_row_for_its_lease(engine: Engine, user: User) -> None:
    user.make(engine)
    before = row_of(engine, user)
    lease, _ = claim(engine, user, 60)
    row = row_of(engine, user)
    assert (row.fence, row.attempt) == (before.fence + 1, before.attempt + 1) == (lease.fence, lease.attempt)
    assert row.state == lease.state == user.work.begins.get(before.state, before.state)
    assert (row.lease_owner, lease.key) == ("test", row.id)
    assert timedelta(seconds=50) < row.lease_until - row.asked_at <= timedelta(seconds=60)


def test_two_claimants_never_hold_one_row(engine: Engine, user: User) -> None:
    user.make(engine)
    with engine.begin() as connection:
        assert user.claim(connection) is not None
        assert not is_free(engine, user), "it is not waited for either"
    assert not is_free(engine, user)
    expire(engine, user)
    assert is_free(engine, user)


def test_a_row_waits_for_its_time(engine: Engine, user: User) -> None:
    user.make(engine)
    make_available(engine, user, "now() + interval '1 hour'")
    assert not is_free(engine, user)


def test_a_lease_that_is_renewed_in_time_is_kept(engine: Engine, user: User) -> None:
    user.make(engine)
    lease, _ = claim(engine, user)
    expire(engine, user)
    ask(engine, lease.keep)
    assert not is_free(engine, user)


def test_a_renewal_from_beside_the_work_waits_for_no_transaction(engine: Engine, user: User) -> None:
    user.make(engine)
    lease, _ = claim(engine, user)
    with engine.begin() as connection:
        lease.keep(connection)
        with engine.begin() as beside:
            beside.execute(text("SET LOCAL lock_timeout = '1s'"))
            assert lease.renew(beside) == lease.state
    expire(engine, user)
    ask(engine, lease.renew)
    assert not is_free(engine, user)


def test_whoever_lost_the_lease_writes_nothing(engine: Engine, user: User) -> None:
    expected = undisturbed(engine, user)
    user.make(engine)
    late = claim(engine, user, 0)
    ours = claim(engine, user)
    before = look(engine, user)
    for act in (late[0].keep, late[0].renew, late[0].hand_back):
        with engine.begin() as connection, pytest.raises(LeaseLost):
            act(connection)
    user.carry_out(engine, late)
    assert look(engine, user) == before
    user.carry_out(engine, ours)
    user.finish(engine)
    assert (state_of(engine, user), look(engine, user)[1]) == (user.done, expected)


def test_a_row_that_has_ended_is_claimed_and_written_by_nobody(engine: Engine, user: User) -> None:
    user.make(engine)
    claimed = claim(engine, user)
    user.carry_out(engine, claimed)
    user.finish(engine)
    expire(engine, user)
    before = look(engine, user)
    assert state_of(engine, user) not in user.work.open
    assert not is_free(engine, user)
    with engine.begin() as connection, pytest.raises(LeaseLost):
        claimed[0].keep(connection)
    user.carry_out(engine, claimed)
    assert look(engine, user) == before


def test_a_process_that_stops_hands_back_what_it_has_uncounted(engine: Engine, user: User) -> None:
    expected = undisturbed(engine, user)
    user.make(engine)
    before = row_of(engine, user).attempt
    claimed = claim(engine, user)
    user.carry_out(engine, claimed, lambda: True)
    row = row_of(engine, user)
    assert (row.attempt, row.lease_owner) == (before, None)
    assert is_free(engine, user)
    user.finish(engine)
    assert (state_of(engine, user), look(engine, user)[1]) == (user.done, expected)


def test_an_error_is_counted_and_the_pause_after_it_doubles(engine: Engine, user: User) -> None:
    def fail() -> bool:
        raise ValueError("an error of ours")

    user.make(engine)
    for number in (1, 2, 3):
        lease, payload = claim(engine, user)
        user.carry_out(engine, (lease, payload), fail)
        row = row_of(engine, user)
        assert (row.attempt, row.lease_owner) == (number, None)
        assert timedelta() < row.available_at - row.asked_at <= timedelta(seconds=2**number)
        assert back_off(number) == 2**number
        assert not is_free(engine, user)
        expire(engine, user)
    user.finish(engine)
    assert state_of(engine, user) == user.done


def test_what_never_comes_through_is_given_up_with_a_reason(engine: Engine, user: User) -> None:
    user.make(engine)
    for _ in range(user.max_attempts or 9):
        claim(engine, user)  # and dies
        expire(engine, user)
    if user.max_attempts is None:
        user.finish(engine)
        assert state_of(engine, user) == user.done, "it is tried for ever"
        return

    def refuse() -> bool:
        pytest.fail("nothing more is done for it")

    user.carry_out(engine, claim(engine, user), refuse)
    assert state_of(engine, user) == "failed"
    assert f"was tried {user.max_attempts} times" in str(look(engine, user)[0])


class Killed(BaseException):
    """Where a process was ended: nothing that it would have done afterwards is done."""


def test_a_process_killed_at_any_step_leaves_a_row_that_another_brings_to_its_end(
    engine: Engine, user: User
) -> None:
    expected = undisturbed(engine, user)
    number, was_killed = 0, True
    while was_killed:
        steps: list[None] = []

        def die(steps: list[None] = steps, last: int = number) -> None:
            steps.append(None)
            if len(steps) > last:  # and at every later one: it is gone
                raise Killed

        user.make(engine)
        claimed = claim(engine, user)
        try:
            with stepping(engine, die) as mortal:
                user.carry_out(mortal, claimed)
        except Killed:
            pass
        was_killed = len(steps) > number
        expire(engine, user)
        user.finish(engine)
        assert (state_of(engine, user), look(engine, user)[1]) == (user.done, expected), number
        clean(engine, user)
        number += 1
    assert number > 2


def test_a_commit_whose_answer_is_lost_is_neither_forgotten_nor_done_twice(
    engine: Engine, user: User, database_url: str
) -> None:
    expected = undisturbed(engine, user)
    number, was_lost = 1, True
    while was_lost:
        deaf = make_engine(database_url, application_name="deaf", pool_size=2)
        original = deaf.dialect.do_commit
        commits: list[None] = []

        def commit(
            connection: Any, original: Any = original, commits: Any = commits, last: int = number
        ) -> None:
            original(connection)
            commits.append(None)
            if len(commits) == last:
                raise psycopg.OperationalError("the connection was lost")

        user.make(engine)
        claimed = claim(engine, user)
        deaf.dialect.do_commit = commit  # type: ignore[method-assign, assignment]
        try:
            user.carry_out(deaf, claimed)
        except SQLAlchemyError:  # of a hand-back
            pass
        finally:
            deaf.dispose()
        was_lost = len(commits) >= number
        expire(engine, user)
        user.finish(engine)
        assert (state_of(engine, user), look(engine, user)[1]) == (user.done, expected), number
        clean(engine, user)
        number += 1
    assert number > 2


def try_to_cancel(engine: Engine, user: User) -> bool:
    """False when somebody holds what it needs: it is cancelled later then."""
    try:
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '20ms'"))
            user.cancel(connection)
    except OperationalError:
        return False
    return True


def test_a_row_that_is_cancelled_at_any_step_ends_cancelled_or_was_done_before(
    engine: Engine, user: User
) -> None:
    number, was_reached = 0, True
    while was_reached:
        steps: list[None] = []
        outcomes: list[bool] = []

        def cancel(steps: list[None] = steps, outcomes: list[bool] = outcomes, at: int = number) -> None:
            steps.append(None)
            if len(steps) == at + 1:
                outcomes.append(try_to_cancel(engine, user))

        user.make(engine)
        claimed = claim(engine, user)
        with stepping(engine, cancel) as watched:
            user.carry_out(watched, claimed)
        was_reached = bool(outcomes)
        if outcomes != [True]:
            assert try_to_cancel(engine, user)
        is_cancelled = state_of(engine, user) in user.cancelled
        after = look(engine, user)
        with engine.begin() as connection, pytest.raises(LeaseLost):
            claimed[0].keep(connection)
        user.carry_out(engine, claimed)
        assert look(engine, user) == after, number
        user.finish(engine)
        final = state_of(engine, user)
        assert final not in user.work.open
        assert (final in user.cancelled) is is_cancelled, number
        assert is_cancelled or final == user.done, number
        clean(engine, user)
        number += 1
    assert number > 2


@pytest.fixture(scope="module")
def former_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("before")
    extract_release(tree)
    return tree


def test_a_process_of_the_release_before_and_one_of_ours_respect_each_other_s_leases(
    engine: Engine, user: User, database_url: str, former_release: Path
) -> None:
    name = type(user).__name__
    expected = undisturbed(engine, user)
    with former_process(former_release, database_url) as before:
        user.make(engine)
        assert before(f"claim {name}") == 1
        assert not is_free(engine, user)
        expire(engine, user)
        ours = claim(engine, user)
        seen = look(engine, user)
        before(f"finish {name}")
        assert look(engine, user) == seen, "it lost its lease to us"
        assert before(f"claim {name}") == 0

        expire(engine, user)
        assert before(f"claim {name}") == 1
        seen = look(engine, user)
        user.carry_out(engine, ours)
        assert look(engine, user) == seen, "we lost our lease to it"
        before(f"finish {name}")
        user.finish(engine)
        found = look(engine, user)[1]
        if name == "Runs":  # the release before counts a moved row as a new or changed one too
            found, expected = found[1:], expected[1:]
        assert (state_of(engine, user), found) == (user.done, expected)
