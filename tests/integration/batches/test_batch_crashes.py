"""Batches when something ends in the middle: a client's connection, a lease. An indexer: tests/integration/work."""

import socket
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import Engine, text

from indexer.loops import process_batch
from tests.acceptance.relay import relay
from tests.api_server import encode_waiting
from tests.database import execute
from tests.request_batches import create, end_leases, finish, keep_all, line, load_file, write
from tests.waiting import run_together
from vectormill.batches.batches import HeldBatch, claim_batch
from vectormill.batches.files import FileWriter
from vectormill.batches.request_batch import RequestBatch
from vectormill.jobs.submission import JobWriter
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.work.work import Lease

CONTENT = write(line("good", "x"), b"no json", line("empty", " "), line("last", ["y", "z"]))


def count(engine: Engine, table: str, where: str = "true") -> int:
    with engine.connect() as connection:
        found = connection.execute(text(f"SELECT count(*) FROM vectormill.{table} WHERE {where}"))
        return int(found.scalar_one())


def test_a_client_whose_answer_was_lost_repeats_and_has_one_batch(
    client: openai.OpenAI, http: httpx.Client, engine: Engine
) -> None:
    """The connection breaks when the batch is committed, in place of its answer; the official client tries again."""
    file = client.files.create(file=("x", CONTENT), purpose="batch")
    cuts: list[bool] = []

    def cut_first(piece: bytes) -> bool:
        is_first = b"POST /v1/batches" in piece and not cuts
        if is_first:
            cuts.append(True)
        return is_first

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    server = (str(http.base_url.host), http.base_url.port or 0)
    with relay(address, server, lambda: cut_first):
        through = client.with_options(base_url=f"http://{address[0]}:{address[1]}/v1")
        batch = through.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h", metadata={"a": "b"}
        )
    assert cuts == [True]
    assert count(engine, "request_batches") == 1
    assert client.batches.retrieve(batch.id).metadata == {"a": "b"}


def test_what_is_asked_for_again_is_the_same_batch_unless_it_is_wanted_twice(
    client: openai.OpenAI, engine: Engine
) -> None:
    file = client.files.create(file=("x", CONTENT), purpose="batch")

    def ask(key: str | None = None, **wanted: Any) -> str:
        asked: dict[str, Any] = {"endpoint": "/v1/embeddings", "completion_window": "24h"}
        headers = {"Idempotency-Key": key} if key else {}
        return client.batches.create(input_file_id=file.id, extra_headers=headers, **asked | wanted).id

    first = ask()
    assert ask() == first
    assert ask(metadata={"run": "2"}) != first
    keyed = ask("key")
    assert keyed != first
    assert ask("key") == keyed
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
        ask("key", metadata={"x": "y"})
    client.batches.cancel(first)
    second = ask()
    assert second != first  # nobody asks again for what they cancelled
    finish(engine)
    assert ask() == second
    execute(engine, "UPDATE vectormill.request_batches SET created_at = now() - interval '11 minutes'")
    assert ask() != second


def test_two_that_ask_at_once_have_one_batch(client: openai.OpenAI, engine: Engine) -> None:
    file = client.files.create(file=("x", CONTENT), purpose="batch")
    names: list[str] = []

    def ask() -> None:
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        names.append(batch.id)

    run_together(*6 * [ask])
    assert (len(names), len(set(names)), count(engine, "request_batches")) == (6, 1, 1)


Claimed = tuple[Lease, RequestBatch]


def claim(engine: Engine, owner: str) -> Claimed:
    with engine.begin() as connection:
        claimed = claim_batch(connection, owner, 30)
    assert claimed is not None
    return claimed


def hold(engine: Engine, claimed: Claimed) -> HeldBatch:
    lease, batch = claimed
    return HeldBatch(
        engine=engine,
        lease=lease,
        is_stopping=lambda: False,
        batch=batch,
        settings=Settings(),
        registry=Registry({}),
    )


EXPECTED = ["good", "last"]


def check_outcome(client: openai.OpenAI, engine: Engine, batch_id: str) -> None:
    """As if nothing had happened: one job, two files, every line once."""
    batch = client.batches.retrieve(batch_id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    assert [each["custom_id"] for each in load_file(client, batch.output_file_id)] == EXPECTED
    errors = load_file(client, batch.error_file_id)
    assert [each["custom_id"] for each in errors] == [None, "empty"]
    assert count(engine, "jobs", "state NOT IN ('uploading', 'deleting')") == 1
    assert count(engine, "request_files", "state = 'processed'") == 3


def test_who_lost_the_lease_of_a_batch_writes_nothing_of_it(
    client: openai.OpenAI, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow indexer wakes behind another, in the middle of its reading and at its end."""
    writers: tuple[tuple[Any, str], ...] = ((JobWriter, "finish"), (FileWriter, "finish_in"))
    for slow, moment in writers:
        batch = create(client, CONTENT, metadata={"moment": moment})
        if moment == "finish_in":
            keep_all(engine)
            encode_waiting(engine)
        original: Any = getattr(slow, moment)

        def overtaken(*arguments: Any, original: Any = original, moment: str = moment) -> Any:
            monkeypatch.undo()
            if moment == "finish":
                end_leases(engine)
                finish(engine)
            else:  # its transaction is open, and holds the batch: another sees it only when that has ended
                assert keep_all(engine) == 0
            return original(*arguments)

        claimed = claim(engine, "slow")
        monkeypatch.setattr(slow, moment, overtaken)
        process_batch(hold(engine, claimed))
        finish(engine)
        check_outcome(client, engine, batch.id)
        with engine.begin() as connection:
            for table in ("request_batches", "request_files", "jobs"):
                connection.execute(text(f"DELETE FROM vectormill.{table}"))


LOOKS = {
    "ix_request_batches_open": "request_batches WHERE state IN "
    "('validating', 'in_progress', 'finalizing', 'cancelling') AND available_at <= now() ORDER BY seq LIMIT 1",
    "ix_request_batches_content_hash": "request_batches WHERE content_hash = '\\x00' AND idempotency_key IS NULL",
    "ix_request_batches_job_id": "request_batches WHERE job_id = '00000000-0000-0000-0000-000000000000'",
    "ix_request_batches_input": "request_batches WHERE input_file_id = '00000000-0000-0000-0000-000000000000' "
    "AND state = 'validating'",
    "ix_request_batches_finished_at": "request_batches WHERE finished_at < now() ORDER BY finished_at LIMIT 9",
    "uq_request_batches_seq": "request_batches WHERE seq < 9000 ORDER BY seq DESC LIMIT 20",
    "ix_request_files_listed": "request_files WHERE state = 'processed' AND seq < 9000 ORDER BY seq DESC LIMIT 20",
    "ix_request_files_purpose": "request_files WHERE state = 'processed' AND purpose = 'batch_output' AND seq < 90000 "
    "ORDER BY seq DESC LIMIT 20",
    "ix_request_files_expires_at": "request_files WHERE state = 'processed' AND expires_at <= now() "
    "ORDER BY expires_at LIMIT 9",
    "ix_request_files_unlisted": "request_files WHERE state = 'deleting' LIMIT 1",
}


def test_looks_for_batches_and_files_are_read_from_an_index(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("""
                INSERT INTO vectormill.request_batches
                       (id, state, endpoint, input_file_id, completion_window, content_hash, expires_at, finished_at,
                        job_id)
                SELECT gen_random_uuid(), CASE WHEN n < 500 THEN 'validating' ELSE 'completed' END,
                       '/v1/embeddings', gen_random_uuid(), '24h',
                       decode(md5(n::text), 'hex'), now(), now() + make_interval(hours => n), gen_random_uuid()
                  FROM generate_series(1, 20000) AS n
            """)
        )
        connection.execute(
            text("""
                INSERT INTO vectormill.request_files (id, state, purpose, filename, expires_at)
                SELECT gen_random_uuid(), 'processed', CASE WHEN n < 50 THEN 'batch_output' ELSE 'batch' END, n,
                       now() + make_interval(hours => n)
                  FROM generate_series(1, 20000) AS n
            """)
        )
        connection.execute(text("ANALYZE vectormill.request_batches, vectormill.request_files"))
        overdue = "request_batches WHERE state = 'in_progress' AND NOT is_overdue ORDER BY seq LIMIT 1"
        for index, look in (*LOOKS.items(), ("ix_request_batches_open", overdue)):
            plan = connection.execute(text(f"EXPLAIN SELECT id FROM vectormill.{look}"))
            assert index in "\n".join(plan.scalars()), look
