"""Nothing is deleted when its time is over while something is yet to be made of it."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from sqlalchemy import Connection, Engine

from tests.building import build, encode_all, put
from tests.database import ask, execute
from tests.protocol import claim_next, complete, make_items, register_worker, submit
from vectormill.collections.generations import discard_generation
from vectormill.domain.errors import WrongJobState
from vectormill.jobs.deletion import discard_ended_puts, discard_expired_jobs, discard_job
from vectormill.jobs.item import ItemFailure
from vectormill.runs.runs import prune_runs
from vectormill.webhooks.webhooks import prune_deliveries

EVER = -1.0  # seconds of retention after which everything is past it


class Debt(NamedTuple):
    """A debt of an ended job: a statement after which something is owed to the job, and one that settles it."""

    what: str
    owe: str
    pay: str


# The chunks of the job were computed in a period that began a minute ago.
COMPUTE = (
    "WITH period AS (INSERT INTO vectormill.proofs (worker, incarnation, model, began_at, failed_at) "
    "SELECT name, %s, model, now() - interval '1 minute', CAST(%s AS timestamptz) FROM vectormill.workers "
    "RETURNING id) UPDATE vectormill.chunks SET proof_id = period.id FROM period"
)

DEBTS = (
    Debt(
        "an output that could not be closed",
        "INSERT INTO vectormill.job_outputs (id, url, state, last_error) "
        "SELECT id, 'file:///nowhere', 'ended', 'the catalog is away' FROM vectormill.jobs",
        "UPDATE vectormill.job_outputs SET state = 'swept'",
    ),
    Debt(
        "an output whose staged parts are still there",
        "INSERT INTO vectormill.job_outputs (id, url, state) "
        "SELECT id, 'file:///nowhere', 'closed' FROM vectormill.jobs",
        "UPDATE vectormill.job_outputs SET state = 'swept'",
    ),
    Debt(
        "an output of a cancelled job is owed to nobody",
        "INSERT INTO vectormill.job_outputs (id, url, state) "
        "SELECT id, 'file:///nowhere', 'ended' FROM vectormill.jobs",
        "UPDATE vectormill.jobs SET state = 'cancelled'",
    ),
    Debt(
        "the rest of a run",
        "INSERT INTO vectormill.runs (id, collection_id, kind, state, job_id) "
        "SELECT gen_random_uuid(), generations.collection_id, 'reindex', 'running', jobs.id "
        "FROM vectormill.jobs JOIN vectormill.generations ON generations.id = generation_id",
        "UPDATE vectormill.runs SET state = 'completed', finished_at = now()",
    ),
    Debt(
        "a twin in the generation that is being built",
        "INSERT INTO vectormill.generations (collection_id, spec, fingerprint, state, report) "
        """SELECT collection_id, spec, 'next', 'building', '{"since_seq": 0}' FROM vectormill.generations""",
        "UPDATE vectormill.generations SET state = 'retired' WHERE state = 'building'",
    ),
    Debt(
        "a twin in the generation to which a rollback returned",
        "UPDATE vectormill.generations SET state = 'retired'; "
        "INSERT INTO vectormill.generations (collection_id, spec, fingerprint, state) "
        "SELECT collection_id, spec, 'former', 'live' FROM vectormill.generations; "
        "INSERT INTO vectormill.runs (id, collection_id, kind, state, options) "
        "SELECT gen_random_uuid(), collection_id, 'reindex', 'queued', jsonb_build_object("
        "'carry_from', id, 'carry_since', 0, 'allow_missing', true) "
        "FROM vectormill.generations WHERE state = 'retired'",
        "UPDATE vectormill.runs SET state = 'failed', finished_at = now()",
    ),
    Debt(
        "the answers of a batch",
        "INSERT INTO vectormill.request_batches (id, state, endpoint, job_id, input_file_id, completion_window, "
        "content_hash, expires_at) "
        "SELECT gen_random_uuid(), 'finalizing', '/v1/embeddings', id, gen_random_uuid(), '24h', '', 'infinity' "
        "FROM vectormill.jobs",
        "UPDATE vectormill.request_batches SET state = 'completed', finished_at = now()",
    ),
    Debt(
        "the removal of rows of a followed table",
        "UPDATE vectormill.jobs "
        """SET metadata = '{"changes_of": "docs"}', forget_at = 'infinity', num_failed = 1""",
        "UPDATE vectormill.jobs SET metadata = '{}'",
    ),
    Debt(
        "a proof of a worker that is there",
        COMPUTE % ("incarnation", "NULL"),
        "UPDATE vectormill.proofs SET proven_at = now()",
    ),
    Debt(
        "a proof of a worker that vanished",
        COMPUTE % ("incarnation", "NULL"),
        "UPDATE vectormill.workers SET heartbeat_at = now() - interval '1 hour'",
    ),
    Debt(
        "the repair of what a faulty worker has written",
        COMPUTE % ("gen_random_uuid()", "now()"),
        "UPDATE vectormill.proofs SET repaired_at = now()",
    ),
)


def end_job(engine: Engine) -> None:
    """Make an ended job of a put into `docs`, with a failed item."""
    submit(engine, make_items(4), collection="docs")
    complete(engine, claim_next(engine), {0: ItemFailure("encoding_failed", "so it is")})
    execute(engine, "UPDATE vectormill.jobs SET forget_at = 'infinity'")


@pytest.mark.parametrize("debt", DEBTS, ids=lambda debt: debt.what)
@pytest.mark.parametrize("discard", [discard_expired_jobs, discard_ended_puts])
def test_no_job_is_discarded_that_something_is_owed(
    engine: Engine, debt: Debt, discard: Callable[[Connection, float], int]
) -> None:
    register_worker(engine)
    end_job(engine)
    execute(engine, debt.owe)
    assert ask(engine, discard, EVER) == 0
    execute(engine, debt.pay)
    assert ask(engine, discard, EVER) == 1


def test_a_worker_that_computes_nothing_owes_no_job_a_proof(engine: Engine) -> None:
    register_worker(engine)
    execute(engine, (COMPUTE % ("incarnation", "NULL")).replace("1 minute", "1 day"))
    end_job(engine)
    assert ask(engine, discard_ended_puts, EVER) == 1


def test_a_client_does_not_delete_a_job_that_a_run_has_yet_to_copy(engine: Engine) -> None:
    job = put(engine, "a")
    encode_all(engine)
    building = build(engine)
    execute(
        engine, "UPDATE vectormill.generations SET report = '{\"since_seq\": 0}' WHERE state = 'building'"
    )
    with (
        engine.begin() as connection,
        pytest.raises(WrongJobState, match="when the run that builds it has ended"),
    ):
        discard_job(connection, job.id)
    ask(engine, discard_generation, building.id)
    ask(engine, discard_job, job.id)


def test_a_run_that_tells_what_a_generation_lacks_is_kept_while_the_generation_is_live(
    engine: Engine,
) -> None:
    put(engine, "a")
    for options in ("jsonb_build_object('carry_to', id)", "'{}'"):
        execute(
            engine,
            "INSERT INTO vectormill.runs (id, collection_id, kind, state, options, created_at, finished_at) "
            f"SELECT gen_random_uuid(), collection_id, 'reindex', 'failed', {options}, clock_timestamp(), now() "
            "FROM vectormill.generations",
        )
    assert ask(engine, prune_runs, EVER, 10) == 0
    execute(engine, "UPDATE vectormill.generations SET state = 'retired'")
    assert ask(engine, prune_runs, EVER, 10) == 1


def test_a_delivery_that_waits_is_kept_for_a_webhook_that_is_enabled(engine: Engine) -> None:
    webhook_id = execute(
        engine,
        "INSERT INTO vectormill.webhooks (url, events, secret) VALUES ('https://it', '{}', 'whsec_') RETURNING id",
    ).scalar_one()
    execute(
        engine,
        "INSERT INTO vectormill.webhook_deliveries (webhook_id, event_type, payload, created_at) "
        "VALUES (:webhook_id, 'job.completed', '{}', now() - interval '11 days')",
        webhook_id=webhook_id,
    )
    assert ask(engine, prune_deliveries, EVER, 10) == 0
    execute(engine, "UPDATE vectormill.webhooks SET is_enabled = false")
    assert ask(engine, prune_deliveries, EVER, 10) == 1
