"""The certificate of a job names its results and who computed them, and any change of either changes it."""

import hashlib
import io
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, text

from benchmarks.random_embedder import SMALL, write_random_embedder
from tests.api_server import api_client, assert_problem
from tests.api_server import submit as submit_by_http
from tests.chunk_work import encode_all
from tests.database import ask, execute
from tests.models import DEVICE, TinyModels, packaged_model
from tests.obedient_engine import encoding_chunks, run_to_end
from tests.protocol import SPEC, claim_next, complete, make_items, submit
from tests.rexuninlu import GOLDEN, find_case
from vectormill.client import Client
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import ModelError, WrongJobState
from vectormill.jobs.certificates import write_certificate_lines
from vectormill.jobs.item import EMPTY_TEXT, Item, ItemFailure
from vectormill.models.registry import Registry, make_spec
from vectormill.results.kind import pack_objects, read_objects
from vectormill.settings import ModelEntry, Settings
from vectormill.vectors.representations import unpack
from vectormill.workers.proofs import begin_period
from worker.certificates.resampling import verify_job
from worker.engine.engine import Engine as EncodingEngine
from worker.settings import WorkerSettings

REPORT = {"precision": {"value": "fp32"}}


def read_lines(engine: Engine, job_id: UUID) -> list[dict[str, Any]]:
    """Return the lines of a certificate, after a check of its last digest."""
    written = list(write_certificate_lines(engine, job_id))
    lines = [json.loads(line) for line in written]
    assert lines[-1]["digest"] == hashlib.sha256(b"".join(written[:-1])).hexdigest()
    return lines


def digests(lines: Sequence[dict[str, Any]]) -> list[str]:
    return [line["digest"] for line in lines if line["kind"] == "chunk"]


def test_a_certificate_has_the_spec_the_counts_the_workers_and_a_digest_of_each_chunk(engine: Engine) -> None:
    periods = [ask(engine, begin_period, "w-cpu0@host", uuid4(), SPEC.model, REPORT) for _ in range(2)]
    job = submit(engine, make_items(10))
    current = iter([periods[0], periods[0], periods[1]])
    with encoding_chunks(engine, read_period=lambda: next(current)) as encoder:
        run_to_end(engine, encoder, job)
    lines = read_lines(engine, job.id)
    assert [line["kind"] for line in lines] == ["job", "proof", "chunk", "chunk", "proof", "chunk", "end"]
    assert (lines[0]["id"], lines[0]["num_items"], lines[0]["num_done"]) == (str(job.id), 10, 10)
    assert lines[0]["spec"] == SPEC.to_json()
    assert (lines[1]["worker"], lines[1]["report"]) == ("w-cpu0@host", REPORT)
    chunks = [line for line in lines if line["kind"] == "chunk"]
    assert [(line["first_item"], line["num_items"], line["num_results"]) for line in chunks] == [
        (0, 4, 4),
        (4, 4, 4),
        (8, 2, 2),
    ]
    assert [line["proof"] for line in chunks] == [periods[0], periods[0], periods[1]]
    assert not any(line["suspect"] for line in chunks)
    assert (lines[-1]["num_chunks"], lines[-1]["num_suspect_chunks"]) == (3, 0)


@pytest.mark.parametrize("collection", [None, "docs"])
def test_equal_jobs_have_equal_digests_and_another_text_key_or_result_has_another(
    collection: str | None, engine: Engine
) -> None:
    """A result in a collection is changed by another job; there the earlier job has none any more."""

    def certify(items: list[Item], name: str | None, failures: Any = None) -> list[str]:
        job = submit(engine, items, collection=name)
        complete(engine, claim_next(engine), failures)
        return digests(read_lines(engine, job.id))

    first = certify(make_items(3), collection)
    assert certify(make_items(3), collection and "again") == first
    assert certify([*make_items(2), Item("k2", b"another")], collection and "text") != first
    assert certify([*make_items(2), Item("other", b"text k 2")], collection and "key") != first
    failed = {2: ItemFailure(EMPTY_TEXT, "")}
    assert certify(make_items(3), collection and "result", failed) != first


def test_a_changed_result_changes_the_digest_of_its_chunk_alone(engine: Engine) -> None:
    job = submit(engine, make_items(8))
    for _ in range(2):
        complete(engine, claim_next(engine))
    before = digests(read_lines(engine, job.id))
    with engine.begin() as connection:
        connection.execute(
            text("""
                UPDATE vectormill.chunk_vectors SET vectors = set_byte(vectors, 9, get_byte(vectors, 9) # 1)
                 WHERE chunk_id = (SELECT max(id) FROM vectormill.chunks)
            """)
        )
    after = digests(read_lines(engine, job.id))
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_the_client_writes_the_certificate_and_an_open_job_has_none(engine: Engine, tmp_path: Path) -> None:
    with api_client(engine) as http:
        job_id = submit_by_http(http, [{"key": "a", "text": "one"}])["id"]
        answer = http.get(f"/v1/jobs/{job_id}/certificate")
        assert_problem(answer, 409, "wrong-job-state", "it has a certificate when it has ended")
        complete(engine, claim_next(engine))
        with Client(str(http.base_url)) as client:
            file = io.BytesIO()
            client.certificate(job_id, file)
            client.certificate(job_id, tmp_path / "certificate.jsonl")
    expected = b"".join(write_certificate_lines(engine, UUID(job_id)))
    assert file.getvalue() == (tmp_path / "certificate.jsonl").read_bytes() == expected


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelEntry]:
    tiny = TinyModels(tmp_path_factory.mktemp("models"))
    many = write_random_embedder(SMALL, packaged_model(), tmp_path_factory.mktemp("many") / "many")
    return {
        "tiny": ModelEntry(path=str(tiny.sentence_transformer("mean", normalize=True))),
        "many": ModelEntry(path=str(many)),
        "rex": ModelEntry(path=str(GOLDEN / "model")),
    }


# Codes are compared otherwise than vectors, which the outputs of the next test have.
@pytest.mark.parametrize("vector_type", [None, "int8", "binary"])
def test_a_sample_of_a_job_is_encoded_again_and_a_wrong_result_is_found(
    vector_type: str | None,
    engine: Engine,
    models: dict[str, ModelEntry],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Registry(models).card("tiny", weights=True)
    spec = make_spec(card, EncodingOptions(vector_type=vector_type))
    if vector_type == "binary":  # a job of the release before
        spec = replace(spec, revision=card.aliases[0])
    settings = Settings(models=models, cache_dir=tmp_path)
    worker_settings = WorkerSettings(backend="torch", precision="fp32", threads=1)
    items = [Item(f"k{number}", f"number {number} and {number * 7}".encode()) for number in range(40)]
    job = submit(engine, items, spec=spec, chunk_max_items=16)
    with pytest.raises(WrongJobState, match="when it has ended"):
        verify_job(engine, job.id, 4, settings, worker_settings, lambda *_: None, random.Random(1))
    model = EncodingEngine(card, DEVICE, worker_settings, tmp_path)
    model.start()
    try:
        encode_all(engine, model, "tiny")
    finally:
        model.stop()
    # Each sample starts a model process, so one is enough to see both that most agree and that one does not.
    damage = "vectors = overlay(vectors PLACING substring(vectors FROM 1 + :width FOR :width) FROM 1)"
    width = {None: 4 * spec.dimensions, "int8": 1 + spec.dimensions, "binary": 1 + spec.dimensions // 8}
    with engine.begin() as connection:
        connection.execute(
            text(f"UPDATE vectormill.chunk_vectors SET {damage} WHERE chunk_id = :id"),
            {"width": width[vector_type], "id": _first_chunk(engine, job.id)},
        )
    verdict = verify_job(engine, job.id, 200, settings, worker_settings, lambda *_: None, random.Random(1))
    assert (verdict.num_compared, verdict.differing) == (40, ["k0"])
    (agreement,) = verdict.agreements
    assert agreement.least == {None: 0.999, "int8": 0.99, "binary": 0.95}[vector_type]
    assert agreement.smallest < agreement.least
    assert verdict.encoded_with.startswith("torch fp32")


OUTPUTS = "dense,sparse,multi_vector"
TEXT = find_case("ee_sport")["text"]
SCHEMA = json.dumps(find_case("ee_sport")["schema"])
ASKED: dict[str, tuple[EncodingOptions, list[str]]] = {
    "many": (EncodingOptions(outputs=OUTPUTS), OUTPUTS.split(",")),
    "rex": (EncodingOptions(extract_schema=SCHEMA, confidences=True), ["record"]),
}
# The sparse weights and records of the last item, whose text is another, and other vectors.
DAMAGE = {
    "many": (
        "embedding = live.embedding * live.embedding",
        "sparse = other.sparse",
        "multi_vector[2] = live.multi_vector[3]",
    ),
    "rex": ("output = other.output",),
}


@pytest.mark.parametrize(
    ("name", "collection"),
    [
        ("many", None),
        ("many", "docs"),
        ("rex", None),
        ("rex", "docs"),
    ],
)
def test_of_a_sample_every_output_and_every_record_is_compared(
    name: str, collection: str | None, engine: Engine, models: dict[str, ModelEntry], tmp_path: Path
) -> None:
    options, results = ASKED[name]
    card = Registry(models).card(name, weights=True)
    settings = Settings(models=models, cache_dir=tmp_path)
    worker_settings = WorkerSettings(backend="torch", precision="fp32", threads=1)
    items = [Item(f"k{number}", (TEXT if number < 7 else TEXT[:9]).encode()) for number in range(8)]
    job = submit(engine, items, spec=make_spec(card, options), chunk_max_items=8, collection=collection)
    model = EncodingEngine(card, DEVICE, worker_settings, tmp_path)
    model.start()
    try:
        encode_all(engine, model, name)
    finally:
        model.stop()
    with engine.begin() as connection:
        period = begin_period(connection, "w-cpu0@host", uuid4(), name, REPORT)
        connection.execute(text("UPDATE vectormill.chunks SET proof_id = :period"), {"period": period})
        if collection is None:
            _damage_own(connection, name)
        else:
            table = "vectormill.generation_1"
            for number, change in enumerate(DAMAGE[name]):
                connection.execute(
                    text(
                        f"UPDATE {table} AS live SET {change} FROM {table} AS other"
                        f" WHERE live.key = 'k{number}' AND other.key = 'k7'"
                    )
                )
    verdict = verify_job(engine, job.id, 200, settings, worker_settings, lambda *_: None, random.Random(1))
    assert [each.result for each in verdict.agreements] == results
    assert verdict.num_compared == 8, verdict
    assert verdict.differing == [f"k{number}" for number in range(len(results))], verdict
    for each in verdict.agreements:
        assert each.smallest < each.least <= 1
        assert each.mean > 0.8
    assert verdict.agreements[0].least == (0.9999 if name == "many" else 1.0)


def _damage_own(connection: Connection, name: str) -> None:
    """Change one output of each of the first three items, or the first item's confidences by a hundredth."""
    stored = connection.execute(text("SELECT vectors FROM vectormill.chunk_vectors")).scalar_one()
    rows = read_objects(bytes(stored), 8)
    if name == "rex":
        assert rows[0] is not None
        records = json.loads(rows[0])
        records[0][0]["confidence"] += 0.01
        rows[0] = json.dumps(records).encode()
    else:
        dense, sparse, tokens, *_ = (unpack(row or b"") for row in rows)
        rows[0] = replace(dense, dense=dense.dense[::-1]).pack()
        rows[1] = replace(sparse, weights=sparse.weights * 1.5).pack()
        rows[2] = replace(tokens, vectors=tokens.vectors * np.float16(1.5)).pack()
    connection.execute(
        text("UPDATE vectormill.chunk_vectors SET vectors = :rows"), {"rows": pack_objects(rows)}
    )


def _first_chunk(engine: Engine, job_id: UUID) -> int:
    return int(
        execute(engine, "SELECT min(id) FROM vectormill.chunks WHERE job_id = :id", id=job_id).scalar_one()
    )


def test_another_revision_of_the_model_is_not_compared(
    engine: Engine, models: dict[str, ModelEntry], tmp_path: Path
) -> None:
    spec = make_spec(Registry(models).card("tiny"), EncodingOptions(dimensions=8))
    job = submit(engine, make_items(2), spec=spec)
    complete(engine, claim_next(engine))
    other = {"tiny": replace(models["tiny"], revision="another")}
    settings = Settings(models=other, cache_dir=tmp_path)
    with pytest.raises(ModelError, match="here another is registered"):
        verify_job(engine, job.id, 4, settings, WorkerSettings(), lambda *_: None, random.Random(1))
