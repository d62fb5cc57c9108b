"""What the database refuses for good fails with its reason; what passes is waited for; and every job ends."""

import pytest
from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.obedient_engine import encoding_chunks, run_to_end
from tests.protocol import make_items, submit
from vectormill.jobs.item import ENCODING_FAILED, NOT_STORED, Item
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import find_job, list_item_errors, retry_job


def refuse(engine: Engine, event: str, table: str, sqlstate: str, times: int = 1_000_000) -> None:
    """From now on the table refuses as many of these writes with an error of this class."""
    with engine.begin() as connection:
        connection.execute(text("CREATE SEQUENCE refusals"))  # counts rolled back ones too
        connection.execute(
            text(f"""
                CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN
                    IF nextval('refusals') <= {times} THEN
                        RAISE EXCEPTION 'no, and no again' USING ERRCODE = '{sqlstate}';
                    END IF;
                    RETURN NEW;
                END $$""")
        )
        connection.execute(
            text(
                f"CREATE TRIGGER refuse BEFORE {event} ON {table} FOR EACH STATEMENT EXECUTE FUNCTION refuse()"
            )
        )


def errors_of(engine: Engine, job: Job) -> dict[str, tuple[str, str]]:
    errors = ask(engine, list_item_errors, job.id, after=None, limit=1000)
    return {error.key: (error.code, error.detail) for error in errors}


def submit_to(engine: Engine, collection: str | None) -> tuple[Job, str]:
    """A job of three items, and the table that its vectors go to."""
    job = submit(engine, make_items(3), collection=collection)
    generation = execute(engine, "SELECT generation_id FROM vectormill.jobs").scalar_one()
    return job, f"vectormill.generation_{generation}" if generation else "vectormill.chunk_vectors"


@pytest.mark.parametrize(("sqlstate", "collection"), [("23514", None), ("42883", "docs")])
def test_a_chunk_that_the_database_refuses_for_good_fails_with_its_reason_at_once(
    engine: Engine, sqlstate: str, collection: str | None
) -> None:
    job, table = submit_to(engine, collection)
    refuse(engine, "INSERT", table, sqlstate)
    with encoding_chunks(engine) as encoder:
        ended, outcomes = run_to_end(engine, encoder, job)
    assert outcomes == ["chunk failed"]
    assert (ended.state, ended.num_failed) == ("failed", 3)
    errors = errors_of(engine, job)
    assert set(errors) == {"k0", "k1", "k2"}
    code, detail = errors["k0"]
    assert code == NOT_STORED
    assert f"no, and no again (SQLSTATE {sqlstate})" in detail
    with engine.begin() as connection:  # mended, it is tried again as any failed item
        connection.execute(text("DROP FUNCTION refuse CASCADE"))
        retry_job(connection, job.id)
    with encoding_chunks(engine) as encoder:
        ended, _ = run_to_end(engine, encoder, job)
    assert (ended.state, ended.num_done) == ("completed", 3)


@pytest.mark.parametrize(
    ("metadata", "words", "sqlstate"),
    [
        (b'{"x":NaN}', b"short", "22P02"),
        (b"", b" ".join(b"%d" % number for number in range(200_000)), "54000"),  # more than a tsvector holds
    ],
)
def test_a_text_that_the_database_refuses_fails_alone_and_its_neighbours_are_stored(
    engine: Engine, metadata: bytes, words: bytes, sqlstate: str
) -> None:
    items = make_items(8)
    items[5] = Item("k5", words, metadata)
    submit(engine, items[:1], collection="docs")
    execute(engine, "UPDATE vectormill.collections SET keep_text = true")
    job = submit(engine, items, collection="docs", chunk_max_items=8)
    with encoding_chunks(engine) as encoder:
        ended, _ = run_to_end(engine, encoder, job)
    assert (ended.state, ended.num_done, ended.num_failed) == ("completed_with_errors", 7, 1)
    ((key, (code, detail)),) = errors_of(engine, job).items()
    assert (key, code) == ("k5", NOT_STORED)
    assert f"(SQLSTATE {sqlstate})" in detail


@pytest.mark.parametrize("sqlstate", ["22003", "54000"])
def test_a_job_ends_though_the_database_refuses_every_value_of_it(engine: Engine, sqlstate: str) -> None:
    job, table = submit_to(engine, "docs")
    refuse(engine, "INSERT", table, sqlstate)
    with encoding_chunks(engine) as encoder:
        ended, outcomes = run_to_end(engine, encoder, job)
    assert sorted(outcomes) == ["item failed", "item failed", "item failed", "split", "split"]
    assert (ended.state, ended.num_failed) == ("failed", 3)


@pytest.mark.parametrize(
    ("sqlstate", "collection"),
    [("40001", None), ("53100", "docs"), ("55P03", None), ("57P03", "docs"), ("25006", None)],
)
def test_what_passes_is_waited_for_and_costs_no_attempt(
    engine: Engine, sqlstate: str, collection: str | None
) -> None:
    job, table = submit_to(engine, collection)
    refuse(engine, "INSERT", table, sqlstate, times=2)
    with encoding_chunks(engine) as encoder:
        ended, outcomes = run_to_end(engine, encoder, job)
    assert outcomes == ["done"]
    assert (ended.state, ended.num_retried_chunks) == ("completed", 0)


def test_an_error_that_may_be_either_counts_as_an_attempt_until_the_job_ends(engine: Engine) -> None:
    job = submit(engine, make_items(2))
    refuse(engine, "INSERT", "vectormill.chunk_vectors", "XX000")
    with encoding_chunks(engine, max_attempts=2) as encoder:
        ended, outcomes = run_to_end(engine, encoder, job)
    assert ended.state == "failed"
    assert outcomes.count("failed") >= 2


@pytest.mark.parametrize("sqlstate", ["22003", "XX000"])
def test_a_chunk_that_cannot_be_split_fails_and_its_job_ends(engine: Engine, sqlstate: str) -> None:
    job = submit(engine, make_items(4))
    execute(engine, "UPDATE vectormill.chunks SET lost = 2")
    refuse(engine, "INSERT", "vectormill.chunks", sqlstate)
    with encoding_chunks(engine) as encoder:
        ended, outcomes = run_to_end(engine, encoder, job)
    assert outcomes == ["chunk failed"]
    assert (ended.state, ended.num_failed, ended.num_open_chunks) == ("failed", 4, 0)
    assert errors_of(engine, job)["k3"][0] == NOT_STORED


@pytest.mark.parametrize("damage", ["UPDATE vectormill.chunk_payloads SET items = '\\x00'",
                                    "DELETE FROM vectormill.chunk_payloads"])  # fmt: skip
def test_a_job_whose_texts_cannot_be_read_ends(engine: Engine, damage: str) -> None:
    job = submit(engine, make_items(3))
    execute(engine, damage)
    with encoding_chunks(engine, max_attempts=2) as encoder:
        ended, _ = run_to_end(engine, encoder, job)
    assert (ended.state, ended.num_failed, ended.num_open_chunks) == ("failed", 3, 0)
    errors = ask(engine, list_item_errors, job.id, after=None, limit=10)
    assert ask(engine, find_job, job.id).is_terminal
    assert [error.code for error in errors] == [ENCODING_FAILED] * 3
