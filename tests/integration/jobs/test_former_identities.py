"""A model's revision was named otherwise by the release before: what is stored under that name goes on and is not
encoded again."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine

from tests import protocol
from tests.api_server import (
    SMALL,
    api_client,
    assert_problem,
    encode_waiting,
    encoding_meanwhile,
    many,
    submit,
)
from tests.database import ask, execute
from tests.indexers import ListedSource, await_run, count_encoded, indexing
from tests.protocol import make_items, vector_of
from tests.queries import listening
from vectormill.broker.queries import name_space
from vectormill.cli import doctor
from vectormill.cli.imports import refuse_other_spec
from vectormill.client import Client
from vectormill.collections.collections import find_generation
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import SpecMismatch
from vectormill.jobs.job import NewJob
from vectormill.jobs.jobs import find_job
from vectormill.jobs.submission import JobWriter
from vectormill.models import card_reader
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import DEFAULT_MODEL, Registry, make_spec
from vectormill.runs.run import COMPLETED, Run
from vectormill.settings import Settings
from vectormill.sources.reader import SourcePlace
from vectormill.sources.vectors import VectorSource

CARD = Registry({}).card(DEFAULT_MODEL)
NOW = make_spec(CARD, EncodingOptions(dimensions=8))
FORMER = replace(NOW, revision=CARD.aliases[0], aliases=())
ITEMS = make_items(20)
SKIPPED = "Long texts are cut at their beginning (truncation_side)."


@pytest.fixture
def client(engine: Engine, redis_url: str) -> Iterator[httpx.Client]:
    """A client of an API of this release, beside a collection of the release before."""
    protocol.submit(engine, ITEMS, collection="docs", spec=FORMER)
    encode_waiting(engine)
    execute(engine, "UPDATE vectormill.collections SET keep_text = true")
    with api_client(engine, redis_url=redis_url, search_timeout_seconds=60) as client:
        yield client


@pytest.fixture
def rereads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this release read a setting of the model that the one before skipped."""
    read = card_reader.read_card

    def read_anew(*arguments: Any, **options: Any) -> ModelCard:
        return replace(read(*arguments, **options), rereads=(SKIPPED,))

    monkeypatch.setattr("vectormill.models.registry.read_card", read_anew)


def run(engine: Engine, client: httpx.Client, **options: Any) -> Run:
    """Carry out a re-index of the rows that the collection has."""
    with Client(str(client.base_url)) as caller:
        started = caller.reindex("docs", **options)
    with indexing(engine, ListedSource(ITEMS)), encoding_meanwhile(engine):
        ended = await_run(engine, UUID(started["id"]))
    assert (ended.state, ended.error) == (COMPLETED, None)
    return ended


def find_revision(engine: Engine) -> str:
    return ask(engine, find_generation, "docs").spec.revision


def test_a_job_of_this_release_joins_the_collection_under_its_revision(
    client: httpx.Client, engine: Engine
) -> None:
    job = submit(client, many(3), collection="docs")
    assert job["options"]["revision"] == FORMER.revision
    assert encode_waiting(engine) == 1
    assert client.get(f"/v1/jobs/{job['id']}").json()["state"] == "completed"
    refused = client.post("/v1/jobs", json={"items": many(1), "collection": "docs", "options": {}})
    problem = assert_problem(refused, 409, "spec-mismatch", "dimensions is 8, not 384")
    assert "revision" not in problem["detail"]
    assert submit(client, many(1), collection="others")["options"]["revision"] == NOW.revision


def test_a_run_and_a_reindex_with_unchanged_options_encode_nothing(
    client: httpx.Client, engine: Engine
) -> None:
    for options in ({}, {"dimensions": 8}, {"model": DEFAULT_MODEL, "dimensions": 8}):
        assert run(engine, client, **options).counts.num_seen == 20
        assert count_encoded(engine) == 0
    assert find_revision(engine) == FORMER.revision
    quote = client.post(
        "/v1/jobs", json={"items": many(3), "collection": "docs", "options": SMALL, "dry_run": True}
    )
    assert quote.status_code == 200, quote.text


def test_a_reindex_with_other_options_takes_the_new_revision(client: httpx.Client, engine: Engine) -> None:
    run(engine, client, prompt="query: ")
    assert (find_revision(engine), count_encoded(engine)) == (NOW.revision, 20)


def test_a_job_that_is_sent_again_after_the_upgrade_is_the_one_of_before(engine: Engine) -> None:
    for collection in (None, "docs"):
        key = f"once {collection}"
        jobs = [
            protocol.submit(engine, ITEMS, spec=spec, collection=collection, idempotency_key=key)
            for spec in (FORMER, NOW)
        ]
        assert jobs[0].id == jobs[1].id


def test_a_collection_that_a_former_api_creates_meanwhile_gives_the_job_its_revision(engine: Engine) -> None:
    with JobWriter(engine, NewJob(NOW, collection="docs"), Settings(chunk_max_items=4)) as writer:
        for item in ITEMS:
            writer.add(item)
        protocol.submit(engine, make_items(1, "other"), collection="docs", spec=FORMER)
        job = writer.finish()
    assert ask(engine, find_job, job.id).spec == FORMER
    encode_waiting(engine)
    assert ask(engine, find_job, job.id).num_done == 20


def test_queries_under_either_name_are_answered_by_a_worker_of_this_release(
    client: httpx.Client, redis_url: str
) -> None:
    spaces = [name_space(CARD.name, each, "+".join(CARD.pooling)) for each in CARD.revisions]
    with listening(redis_url, lambda _: None, *spaces):
        found = client.post("/v1/collections/docs/search", json={"text": "text k 4", "limit": 1})
        assert found.json()["data"][0]["key"] == "k4"
        assert client.post("/v1/embeddings", json={"input": "text"}).status_code == 200
    with listening(redis_url, lambda _: None, spaces[1]):  # one of the release before
        found = client.post("/v1/collections/docs/search", json={"text": "text k 4", "limit": 1})
        assert found.json()["data"][0]["key"] == "k4"


def search(client: httpx.Client, fingerprint: str) -> httpx.Response:
    query = {"embedding": vector_of(b"text k 4").tolist(), "fingerprint": fingerprint, "limit": 1}
    return client.post("/v1/collections/docs/search", json=query)


def test_a_vector_finds_its_row_under_either_name_of_its_space(client: httpx.Client) -> None:
    for spec in (NOW, FORMER):
        assert search(client, spec.fingerprint()).json()["data"][0]["key"] == "k4"
    assert_problem(search(client, "0" * 16), 409, "spec-mismatch", FORMER.fingerprint())


def test_vectors_under_either_name_are_imported(engine: Engine) -> None:
    place = SourcePlace(engine, Settings(), Registry({}), collection="docs")
    stated = {"model": DEFAULT_MODEL, "dimensions": 8}
    for kept in (NOW, FORMER):
        live = replace(kept, aliases=())
        for theirs in (None, FORMER, replace(NOW, aliases=())):
            refuse_other_spec(place, live, stated, VectorSource(None, iter(()), theirs))
        other = replace(NOW, dimensions=16, aliases=())
        with pytest.raises(SpecMismatch, match=r"another spec: dimensions is 8, not 16\."):
            refuse_other_spec(place, live, stated, VectorSource(None, iter(()), other))


@pytest.mark.usefixtures("rereads")
def test_a_collection_keeps_the_former_reading_until_it_is_reindexed(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit(client, many(1), collection="docs")["options"]["revision"] == FORMER.revision
    encode_waiting(engine)
    assert_problem(search(client, NOW.fingerprint()), 409, "spec-mismatch", FORMER.fingerprint())
    note = client.get("/v1/collections/docs").json()["note"]
    assert SKIPPED in note
    assert "`vectormill reindex docs`" in note
    assert client.get("/v1/collections").json()["data"][0]["note"] == note
    found = {each.name: each for each in doctor.ask_api(str(client.base_url), None)}
    assert (found["collection docs"].status, found["collection docs"].detail) == ("warn", note)

    run(engine, client)
    assert (find_revision(engine), count_encoded(engine)) == (NOW.revision, 20)
    assert client.get("/v1/collections/docs").json()["note"] is None
    run(engine, client)
    assert count_encoded(engine) == 20
