"""A generation that is built beside the live one: twins, swap, rollback, pruning. Real Postgres, no model."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from indexer.swapping import swap as swap_as_run
from tests.building import (
    BITS,
    NEXT,
    build,
    encode_all,
    make_context,
    make_run,
    put,
    rows_of,
    swap,
)
from tests.database import ask, execute
from tests.indexers import start_run
from tests.kinds import RECORDS, SCORES
from tests.protocol import SPEC, claim, complete, dispatch_all, make_items, submit
from vectormill.collections.collections import find_building, find_generation, list_written_generations
from vectormill.collections.generations import (
    NewerRows,
    count_newer_rows,
    discard_generation,
    open_building_generation,
    open_target_generation,
    prune_retired_generations,
    roll_back,
    swap_generations,
)
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import (
    Conflict,
    GenerationNotFound,
    LocksHeld,
    SpecMismatch,
    SwapRefused,
    WrongJobState,
)
from vectormill.jobs import dual_writes
from vectormill.jobs.deletion import discard_expired_jobs, discard_job
from vectormill.jobs.dual_writes import cancel_unwanted_jobs, change_twins
from vectormill.jobs.export import read_results
from vectormill.jobs.item import ItemFailure
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import cancel_job, find_job, list_jobs, retry_job

DAY = 86_400.0


def twins_of(engine: Engine, job: Job) -> list[Job]:
    with engine.connect() as connection:
        return [
            each
            for each in list_jobs(connection, state=None, before_seq=None, limit=100)
            if each.twin_of == job.id
        ]


def test_a_job_during_a_build_has_a_twin_that_writes_the_same_items_into_the_next_generation(
    engine: Engine,
) -> None:
    put(engine, "old")
    encode_all(engine)
    building = build(engine)
    job = put(engine, "a", "b", "c", "d", "e", chunk_max_items=2)
    (twin,) = twins_of(engine, job)
    assert (twin.spec, twin.num_items, twin.num_chunks, twin.state) == (NEXT, 5, 3, "queued")
    assert (twin.seq, twin.collection) == (job.seq + 1, "docs")
    encode_all(engine)
    assert set(rows_of(engine, "docs")) == {"old", "a", "b", "c", "d", "e"}
    assert rows_of(engine, f"vectormill.{building.table_name}") == dict.fromkeys("abcde", job.seq)
    assert ask(engine, find_job, twin.id).state == "completed"


def test_twins_have_the_order_of_their_originals_whichever_is_queued_first(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    building = build(engine)
    jobs = [put(engine, "a", content=f"version {number}") for number in range(3)]
    for job in reversed(jobs):
        (twin,) = twins_of(engine, job)
        assert twin.seq == job.seq + 1
    encode_all(engine)
    assert rows_of(engine, f"vectormill.{building.table_name}") == {"a": jobs[-1].seq}


def test_jobs_that_were_open_when_the_build_began_have_twins_too(engine: Engine) -> None:
    put(engine, "ended")
    encode_all(engine)
    waiting = put(engine, "x", "y")
    building = build(engine)
    assert len(twins_of(engine, waiting)) == 1
    assert build(engine) == building
    assert len(twins_of(engine, waiting)) == 1
    encode_all(engine)
    assert rows_of(engine, f"vectormill.{building.table_name}") == dict.fromkeys("xy", waiting.seq)


def test_a_build_of_yet_another_space_gives_the_earlier_one_up_and_its_jobs_are_cancelled(
    engine: Engine,
) -> None:
    put(engine, "old")
    first = build(engine)
    job = put(engine, "a")
    second = build(engine, BITS)
    assert second.id != first.id
    assert ask(engine, find_building, "docs") == second
    cancel_unwanted_jobs(engine)
    states = {twin.spec.fingerprint(): twin.state for twin in twins_of(engine, job)}
    assert states == {NEXT.fingerprint(): "cancelled", BITS.fingerprint(): "queued"}
    assert prune_retired_generations(engine, 7 * DAY) == 1
    with pytest.raises(Conflict, match="is pruned"):
        ask(engine, discard_generation, first.id)


def test_a_run_in_the_live_space_gives_up_what_another_was_building(engine: Engine) -> None:
    put(engine, "old")
    build(engine)
    assert open_target_generation(engine, "docs", None) == ask(engine, find_generation, "docs")
    assert ask(engine, find_building, "docs") is None


@pytest.mark.parametrize(
    ("state", "days", "is_kept"), [("failed", 1, True), ("failed", 4, False), ("cancelled", 1, False)]
)
def test_a_build_whose_run_failed_lately_is_not_given_up_by_a_run_in_the_live_space(
    engine: Engine, state: str, days: int, is_kept: bool
) -> None:
    put(engine, "old")
    building = build(engine)
    start_run(engine)
    with engine.begin() as connection:
        end = text("""
            UPDATE vectormill.runs
               SET state = :state, generation_id = :id, finished_at = now() - make_interval(days => :days)
        """)
        connection.execute(end, {"state": state, "id": building.id, "days": days})
    assert open_target_generation(engine, "docs", None) == ask(engine, find_generation, "docs")
    assert (ask(engine, find_building, "docs") is not None) == is_kept


@pytest.mark.parametrize("spec", [SPEC, SCORES, RECORDS], ids=lambda spec: spec.task)
def test_a_swap_changes_states_view_and_search_and_a_rollback_changes_them_back(
    engine: Engine, spec: EncodingSpec
) -> None:
    following = replace(spec, revision="2")
    put(engine, "old", "both", spec=spec)
    encode_all(engine)
    live = ask(engine, find_generation, "docs")
    building = build(engine, following)
    put(engine, "both", "new", spec=spec)
    encode_all(engine)
    swap(engine, building)
    assert set(rows_of(engine, "docs")) == {"both", "new"}
    assert ask(engine, find_generation, "docs").id == building.id
    put_later = submit(engine, make_items(2, "later"), collection="docs", spec=following)
    encode_all(engine)
    assert ask(engine, count_newer_rows, "docs") == NewerRows(2, 2)
    with pytest.raises(SpecMismatch, match="revision is '2', not '1'"):
        put(engine, "z", spec=spec)
    undone = act_in_short_locks(engine, lambda connection: roll_back(connection, "docs"))
    assert (undone.live.id, undone.retired.id) == (live.id, building.id)
    assert set(rows_of(engine, "docs")) == {"old", "both", "new"}
    act_in_short_locks(engine, lambda connection: roll_back(connection, "docs"))
    assert rows_of(engine, "docs")["later0"] == put_later.seq


def test_a_swap_waits_for_twins_whose_original_has_ended(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    building = build(engine)
    put(engine, "a")
    first, second = (claim(engine, each.chunk_id) for each in dispatch_all(engine))
    assert first is not None
    assert second is not None
    complete(engine, first if first.spec == SPEC else second)
    assert ask(engine, swap_generations, building.id, wait=lambda seconds: None) is None
    complete(engine, second if first.spec == SPEC else first)
    swap(engine, building)
    assert set(rows_of(engine, "docs")) == {"a"}


def test_a_twin_that_is_still_at_work_after_the_swap_writes_what_is_live_then(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    building = build(engine)
    put(engine, "a")
    swap(engine, building)
    assert rows_of(engine, "docs") == {}
    encode_all(engine)
    assert set(rows_of(engine, "docs")) == {"a"}


def test_a_large_job_is_copied_by_the_run_and_not_while_its_client_waits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dual_writes, "MOST_CHUNKS", 2)
    put(engine, "old")
    encode_all(engine)
    building = build(engine)
    small, large = put(engine, "a", "b"), put(engine, "c", "d", "e", chunk_max_items=1)
    assert (len(twins_of(engine, small)), twins_of(engine, large)) == (1, [])
    encode_all(engine)
    # Neither is the generation swapped without it, nor the original deleted, by whomever.
    assert ask(engine, swap_generations, building.id, wait=lambda seconds: None) is None
    assert ask(engine, discard_expired_jobs, -1.0, 1) == 1
    with (
        engine.begin() as connection,
        pytest.raises(WrongJobState, match="when the run that builds it has ended"),
    ):
        discard_job(connection, large.id)
    turns: list[float] = []

    def wait(seconds: float) -> None:
        turns.append(seconds)
        encode_all(engine)

    swap_as_run(make_context(engine, make_run(building)), wait)
    assert turns, "it has waited for the twin"
    assert {"c", "d", "e"} <= set(rows_of(engine, "docs"))
    ask(engine, discard_job, large.id)


def test_cancelling_a_job_cancels_its_twin(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    build(engine)
    job = put(engine, "a")
    assert ask(engine, cancel_job, job.id).state == "cancelled"
    change_twins(engine, cancel_job, job.id)
    (twin,) = twins_of(engine, job)
    assert twin.state == "cancelled"
    change_twins(engine, cancel_job, job.id)


def test_what_an_api_that_died_did_not_cancel_is_cancelled_by_the_scheduler(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    build(engine)
    job = put(engine, "a")
    ask(engine, cancel_job, job.id)
    assert cancel_unwanted_jobs(engine) == 1
    (twin,) = twins_of(engine, job)
    assert twin.state == "cancelled"


def test_a_retry_is_refused_when_another_generation_has_replaced_what_the_job_wrote(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    building = build(engine)
    job = put(engine, "a")
    for dispatch in dispatch_all(engine):
        claimed = claim(engine, dispatch.chunk_id)
        assert claimed is not None
        complete(engine, claimed, {0: ItemFailure("encoding_failed", "so it is")})
    (twin,) = twins_of(engine, job)
    swap(engine, building)
    with pytest.raises(WrongJobState, match=f"retry its twin {twin.id}"):
        ask(engine, retry_job, job.id)
    ask(engine, retry_job, twin.id)
    encode_all(engine)
    assert set(rows_of(engine, "docs")) == {"a"}


def test_a_deletion_goes_to_all_generations_and_a_put_to_those_that_are_written(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    first = ask(engine, find_generation, "docs")
    second = build(engine)
    swap(engine, second)
    third = build(engine, BITS)
    with engine.begin() as connection:
        assert [each.id for each in list_written_generations(connection, "docs")] == [second.id, third.id]
        all_of_them = list_written_generations(connection, "docs", is_deletion=True)
    assert [each.id for each in all_of_them] == [first.id, second.id, third.id]


def test_a_view_whose_vectors_change_their_type_keeps_grants_comments_and_options(
    engine: Engine, admin: Engine
) -> None:
    put(engine, "old")
    encode_all(engine)
    with admin.begin() as connection:
        connection.execute(text("SET search_path = public"))
        for statement in (
            "DROP ROLE IF EXISTS reader_of_docs",
            "CREATE ROLE reader_of_docs",
            "GRANT SELECT ON docs TO reader_of_docs WITH GRANT OPTION",
            "GRANT SELECT (key) ON docs TO PUBLIC",
            "COMMENT ON VIEW docs IS 'It''s ours'",
            "COMMENT ON COLUMN docs.key IS 'a name'",
            "ALTER VIEW docs SET (security_barrier = true)",
        ):
            connection.execute(text(statement))
    before = ask(engine, describe_view)
    swap(engine, build(engine, BITS))
    after = ask(engine, describe_view)
    assert after["type"] == "bit(8)"
    assert before | {"type": None} == after | {"type": None}
    execute(admin, "DROP OWNED BY reader_of_docs")
    execute(admin, "DROP ROLE reader_of_docs")


def test_a_view_that_is_replaced_in_place_keeps_its_options(engine: Engine) -> None:
    put(engine, "k")
    encode_all(engine)
    execute(engine, "ALTER VIEW docs SET (security_barrier = true)")
    swap(engine, build(engine))
    assert ask(engine, describe_view)["reloptions"] == ["security_barrier=true"]


def describe_view(connection: Connection) -> dict[str, Any]:
    row = connection.execute(
        text("""
            SELECT format_type(attribute.atttypid, attribute.atttypmod) AS type, view.reloptions, view.relowner,
                   (SELECT array_agg(acl::text ORDER BY acl::text) FROM unnest(view.relacl) AS acl) AS grants,
                   (SELECT array_agg(attname || attacl::text) FROM pg_attribute
                     WHERE attrelid = view.oid AND attacl IS NOT NULL) AS column_grants,
                   obj_description(view.oid, 'pg_class') AS comment, col_description(view.oid, 1::int) AS of_key
              FROM pg_class AS view JOIN pg_attribute AS attribute
                ON attribute.attrelid = view.oid AND attribute.attname = 'embedding'
             WHERE view.oid = 'public.docs'::regclass""")
    ).one()
    return dict(row._mapping)


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("CREATE VIEW mine AS SELECT key FROM docs", "view mine depends on view docs"),
        ("CREATE RULE quiet AS ON DELETE TO docs DO INSTEAD NOTHING", "rule quiet"),
    ],
)
def test_what_depends_on_a_view_that_must_be_made_anew_refuses_the_swap_by_name(
    engine: Engine, statement: str, named: str
) -> None:
    put(engine, "old")
    encode_all(engine)
    live = ask(engine, find_generation, "docs")
    building = build(engine, BITS)
    execute(engine, statement)
    with pytest.raises(SwapRefused, match=named):
        swap(engine, building)
    assert ask(engine, find_generation, "docs") == live
    assert set(rows_of(engine, "docs")) == {"old"}
    assert ask(engine, find_building, "docs") == building
    same_type = build(engine, NEXT)
    swap(engine, same_type)
    assert ask(engine, find_generation, "docs").id == same_type.id


def test_a_long_query_on_the_view_makes_the_swap_give_way_and_try_again(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    building = build(engine)
    tries = []

    def end_query(seconds: float) -> None:
        tries.append(seconds)
        assert execute(engine, "SELECT count(*) FROM docs").scalar_one() == 1
        if len(tries) == 2:
            reading.rollback()

    with engine.connect() as reading:
        reading.execute(text("SELECT count(*) FROM docs"))
        act_in_short_locks(
            engine, lambda connection: swap_generations(connection, building.id), wait=end_query
        )
    assert len(tries) == 2
    with engine.connect() as reading:
        reading.execute(text("SELECT count(*) FROM docs"))
        with pytest.raises(LocksHeld):
            act_in_short_locks(engine, lambda connection: roll_back(connection, "docs"), patience_seconds=0)


def test_a_retired_generation_is_pruned_when_its_time_is_over_and_nobody_writes_it(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    first = ask(engine, find_generation, "docs")
    building = build(engine)
    waiting = put(engine, "a")
    swap(engine, building)
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.generations SET retired_at = now() - interval '8 days' WHERE id = :id"),
            {"id": first.id},
        )
    assert prune_retired_generations(engine, 9 * DAY) == 0
    assert prune_retired_generations(engine, 7 * DAY) == 0, "a job still writes it"
    encode_all(engine)
    assert prune_retired_generations(engine, 7 * DAY) == 1
    assert prune_retired_generations(engine, 7 * DAY) == 0
    with engine.connect() as connection:
        tables = "SELECT to_regclass('vectormill.generation_{0}'), to_regclass('vectormill.generation_{0}_attributes')"
        assert tuple(connection.execute(text(tables.format(first.id))).one()) == (None, None)
        assert find_job(connection, waiting.id).collection == "docs"
    with pytest.raises(Conflict, match="no generation to roll back to"):
        ask(engine, roll_back, "docs")
    with pytest.raises(GenerationNotFound, match="contains the current results"):
        read_results(engine, waiting.id)


def test_the_live_generation_is_not_discarded(engine: Engine) -> None:
    put(engine, "old")
    live = ask(engine, find_generation, "docs")
    with pytest.raises(Conflict, match="is live"):
        ask(engine, discard_generation, live.id)
    building = ask(engine, open_building_generation, "docs", NEXT)
    ask(engine, discard_generation, building.id)
    with pytest.raises(Conflict, match="discarded"):
        ask(engine, swap_generations, building.id)


def test_a_commit_into_a_generation_of_another_space_writes_nothing(engine: Engine) -> None:
    put(engine, "a")
    execute(engine, "UPDATE vectormill.generations SET fingerprint = '0123456789abcdef'")
    (dispatch,) = dispatch_all(engine)
    claimed = claim(engine, dispatch.chunk_id)
    assert claimed is not None
    with pytest.raises(SpecMismatch, match="contains vectors of space 0123456789abcdef, but the job's are"):
        complete(engine, claimed)
    assert rows_of(engine, "docs") == {}


def test_a_mismatch_names_what_only_one_side_has(engine: Engine) -> None:
    put(engine, "a")
    with pytest.raises(SpecMismatch, match="vector_type is 'float16', not 'int8'"):
        put(engine, "b", spec=replace(SPEC, vector_type="int8"))
    swap(engine, build(engine, replace(SPEC, vector_type="int8")))
    with pytest.raises(SpecMismatch, match=r"\(vector_type is 'int8', not 'float16'\)"):
        put(engine, "b")
