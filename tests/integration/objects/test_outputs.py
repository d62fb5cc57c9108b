"""Results into object storage: exactly those that a fenced commit has recorded, whatever fails in between."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text

from indexer import loops
from indexer.loops import OutputLoop
from tests.database import ask, execute
from tests.integration.objects.conftest import Place
from tests.kinds import RECORDS, SCORES, numbers_of, records_of
from tests.obedient_engine import FussyEngine, ObedientEngine, encoding_chunks, run_to_end
from tests.outputs import encode_waiting, finish, finish_all, keep_outputs
from tests.protocol import SPEC, claim, dispatch_all, make_items, submit, vector_of
from tests.s3_double import Double
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import EmptyJob, NotFound, OutputTaken, WrongJobState
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.chunk import ChunkOutcome, Claim
from vectormill.jobs.deletion import discard_job
from vectormill.jobs.export import read_results
from vectormill.jobs.item import INPUT_CHANGED, Item, Items
from vectormill.jobs.job import Job, NewJob
from vectormill.jobs.jobs import cancel_job, find_job, list_item_errors, retry_job
from vectormill.jobs.operations import InputBody
from vectormill.jobs.submission import JobWriter
from vectormill.objects.manifest import MANIFEST, read_batches, read_manifest, read_table
from vectormill.objects.output import CLOSING, HeldOutput
from vectormill.objects.parts import name_part, write_staged
from vectormill.objects.reading import add_objects
from vectormill.ragged import Ragged
from vectormill.settings import Settings


def submit_rows(
    engine: Engine, url: str, output_url: str | None, spec: EncodingSpec = SPEC, most: int = 4
) -> Job:
    """Submit the rows of an object, in chunks of at most `most`."""
    settings = Settings(chunk_max_items=most)
    with JobWriter(engine, NewJob(spec, to=output_url), settings) as writer:
        add_objects(writer, InputBody([url], "body", "id"), spec, settings)
        return writer.finish()


def write_rows(place: Place, texts: list[str], name: str = "in.jsonl") -> str:
    """Write texts as an object of JSON Lines with the keys k0, k1, … and return its URL."""
    rows = (json.dumps({"id": f"k{number}", "body": each}) for number, each in enumerate(texts))
    place.write(name, "\n".join(rows).encode())
    return f"{place.url}/{name}"


def assert_vectors(url: str, items: list[Item]) -> None:
    """Compare an output with the known vectors of its items, in their order."""
    table = read_table(url)
    assert table.column("key").to_pylist() == [item.key for item in items]
    assert table.column("content_hash").to_pylist() == [item.content_hash() for item in items]
    expected = [vector_of(item.text) for item in items]
    np.testing.assert_array_equal(np.array(table.column("embedding").to_pylist(), np.float32), expected)


def test_rows_of_an_object_become_parts_of_an_output_and_no_text_is_in_postgres(
    engine: Engine, place: Place
) -> None:
    texts = [f"a text that is nowhere else {number}" for number in range(10)]
    job = submit_rows(engine, write_rows(place, texts), f"{place.url}/out")
    payloads = execute(engine, "SELECT items FROM vectormill.chunk_payloads").scalars().all()
    assert len(payloads) == 3
    assert all(len(payload) < 300 and b"nowhere" not in payload for payload in payloads)
    with encoding_chunks(engine) as encoder:
        ended, _ = run_to_end(engine, encoder, job)
    assert (ended.state, ended.num_done, ended.output_state) == ("completed", 10, "ended")
    with pytest.raises(NotFound, match="when the job has ended"):
        read_table(f"{place.url}/out")
    assert keep_outputs(engine) == 2
    items = [Item(f"k{number}", each.encode()) for number, each in enumerate(texts)]
    assert_vectors(f"{place.url}/out", items)
    manifest = read_manifest(f"{place.url}/out")
    assert (manifest.state, manifest.num_rows, manifest.spec["model"]) == ("completed", 10, SPEC.model)
    assert [part.first_item for part in manifest.parts] == [0, 4, 8]
    assert ask(engine, find_job, job.id).output_state == "swept"
    stored = execute(engine, "SELECT count(*) FROM vectormill.chunk_vectors").scalar_one()
    assert stored == 0
    with pytest.raises(WrongJobState, match="out"):
        next(read_results(engine, job.id))


def test_results_whose_commit_never_came_do_not_count_and_are_swept(engine: Engine, place: Place) -> None:
    items = make_items(4)
    job = submit(engine, items, output_url=f"{place.url}/out")
    (dispatch,) = dispatch_all(engine)
    former = claim(engine, dispatch.chunk_id, "dies", lease_seconds=-1)
    assert former is not None
    write(engine, former, items)  # and is killed here
    with encoding_chunks(engine) as encoder:
        assert encoder.encode_chunk(dispatch.chunk_id)["outcome"] == "done"
        write(engine, former, items)  # it was only slow, and writes once more
        assert encoder.encode_chunk(dispatch.chunk_id)["outcome"] == "duplicate"
    assert ask(engine, find_job, job.id).num_done == 4
    assert len([name for name in place.names() if "_staged" in name]) == 2
    assert keep_outputs(engine, grace_seconds=3600) == 1, "closed, and too young to be swept"
    assert_vectors(f"{place.url}/out", items)
    execute(engine, "UPDATE vectormill.job_outputs SET available_at = now()")
    assert keep_outputs(engine, grace_seconds=3600) == 1
    assert len([name for name in place.names() if "_staged" in name]) == 2, "its writer may yet commit"
    execute(engine, "UPDATE vectormill.job_outputs SET available_at = now()")
    assert keep_outputs(engine) == 1
    (part,) = [name for name in place.names() if not name.startswith("out/_")]
    assert part.endswith(f"-{dispatch.chunk_id}-{former.fence + 1}.parquet")
    assert_vectors(f"{place.url}/out", items)


def write(engine: Engine, claimed: Claim, items: list[Item]) -> None:
    vectors = np.array([vector_of(item.text) for item in items])
    outcome = ChunkOutcome({}, 1, 1)
    write_staged(
        engine,
        claimed,
        Items.of(items),
        np.arange(len(items)),
        Ragged.from_matrix(vectors),
        outcome,
        ANYWHERE,
    )


def test_items_that_failed_are_written_by_a_retry_and_the_manifest_then_has_them(
    engine: Engine, place: Place
) -> None:
    url = write_rows(place, ["one", "two", " ", "four", "five"])
    job = submit_rows(engine, url, f"{place.url}/out", most=2)

    fussy = FussyEngine()
    with encoding_chunks(engine, fussy) as encoder:
        ended, _ = run_to_end(engine, encoder, job)
        assert ended.state == "completed_with_errors"
        keep_outputs(engine)
        assert read_table(f"{place.url}/out").column("key").to_pylist() == ["k0", "k1", "k3", "k4"]
        fussy.is_fussy = False
        assert ask(engine, retry_job, job.id).output_state == "open"
        ended, _ = run_to_end(engine, encoder, job)
    assert (ended.state, ended.num_done) == ("completed", 5)
    keep_outputs(engine)
    assert sorted(read_table(f"{place.url}/out").column("key").to_pylist()) == ["k0", "k1", "k2", "k3", "k4"]
    assert read_manifest(f"{place.url}/out").state == "completed"


def test_a_poisoned_text_is_found_by_halving_references(engine: Engine, place: Place) -> None:
    job = submit_rows(
        engine, write_rows(place, ["a", "b", "c", "poison", "e", "f", "g"]), f"{place.url}/out", most=8
    )

    def poison(request: Any) -> None:
        if b"poison" in request.texts:
            raise ValueError("no good")

    with encoding_chunks(engine, ObedientEngine(poison), max_attempts=1) as encoder:
        ended, outcomes = run_to_end(engine, encoder, job)
    assert (ended.num_done, ended.num_failed) == (6, 1)
    assert 2 <= outcomes.count("split") <= 3
    keep_outputs(engine)
    assert read_table(f"{place.url}/out").column("key").to_pylist() == ["k0", "k1", "k2", "k4", "k5", "k6"]
    (error,) = ask(engine, list_item_errors, job.id, after=None, limit=10)
    assert error.item == 3


def test_an_object_that_changed_fails_its_chunks_by_name_and_nothing_else(
    engine: Engine, place: Place
) -> None:
    job = submit_rows(engine, write_rows(place, ["one", "two", "three"]), f"{place.url}/out", most=2)
    with encoding_chunks(engine) as encoder:
        first, second = sorted(dispatch.chunk_id for dispatch in dispatch_all(engine))
        assert encoder.encode_chunk(first)["outcome"] == "done"
        write_rows(place, ["one", "two", "changed"])
        assert encoder.encode_chunk(second) == {"outcome": "item failed", "code": INPUT_CHANGED}
    (error,) = ask(engine, list_item_errors, job.id, after=None, limit=10)
    assert ask(engine, find_job, job.id).state == "completed_with_errors"
    assert (error.key, error.code) == (f"{place.url}/in.jsonl#2", INPUT_CHANGED)
    assert "has been changed since the job was submitted" in error.detail


def test_a_cancelled_job_has_a_manifest_of_what_it_wrote(engine: Engine, place: Place) -> None:
    job = submit(engine, make_items(8), output_url=f"{place.url}/out")
    first, _ = sorted(dispatch.chunk_id for dispatch in dispatch_all(engine))
    with encoding_chunks(engine) as encoder:
        encoder.encode_chunk(first)
    ask(engine, cancel_job, job.id)
    keep_outputs(engine)
    manifest = read_manifest(f"{place.url}/out")
    assert (manifest.state, manifest.num_rows, manifest.num_items) == ("cancelled", 4, 8)


def test_a_job_whose_results_no_reader_could_see_yet_is_not_deleted(engine: Engine, place: Place) -> None:
    for error, is_cancelled, is_kept in (
        (None, False, True),
        ("no such bucket", False, False),
        (None, True, False),
    ):
        job = submit(engine, make_items(4), output_url=f"{place.url}/out{error}{is_cancelled}")
        if is_cancelled:
            ask(engine, cancel_job, job.id)
        encode_waiting(engine)
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE vectormill.job_outputs SET last_error = :error"), {"error": error}
            )
            if is_kept:
                with pytest.raises(WrongJobState, match="delete it when the state of its output is closed"):
                    discard_job(connection, job.id)
        if is_kept:
            keep_outputs(engine, grace_seconds=3600)
        ask(engine, discard_job, job.id)
        execute(engine, "DELETE FROM vectormill.jobs")


def test_two_jobs_never_share_a_folder_and_a_failed_submission_leaves_none_behind(
    engine: Engine, place: Place
) -> None:
    with pytest.raises(EmptyJob):
        submit(engine, [], output_url=f"{place.url}/out")
    assert place.names() == []
    submit(engine, make_items(1), output_url=f"{place.url}/out")
    with pytest.raises(OutputTaken, match="is not empty"):
        submit(engine, make_items(1), output_url=f"{place.url}/out")
    assert place.names() == ["out/_job.json"]

    def submit_once() -> Job:
        return submit(engine, make_items(1), output_url=f"{place.url}/again", idempotency_key="once")

    assert submit_once().id == submit_once().id


@pytest.mark.parametrize("vector_type", ["float16", "int8", "binary", "float32", None])
def test_every_kind_of_vector_is_the_same_in_a_part_as_in_an_export(
    engine: Engine, place: Place, vector_type: str | None
) -> None:
    spec = replace(SPEC, vector_type=vector_type)
    items = make_items(6)
    beside = submit(engine, items, spec=spec)
    job = submit(engine, items, spec=spec, output_url=f"{place.url}/out")
    with encoding_chunks(engine) as encoder:
        run_to_end(engine, encoder, job)
    if not ask(engine, find_job, beside.id).is_terminal:
        pytest.fail("both jobs are encoded together")
    keep_outputs(engine)
    table = read_table(f"{place.url}/out")
    exported = np.concatenate([block.results for block in read_results(engine, beside.id)])
    written = np.array(table.column("embedding").to_pylist()).astype(exported.dtype)
    np.testing.assert_array_equal(written, exported)
    assert table.schema.field("embedding").type.value_type.to_pandas_dtype() == exported.dtype


def test_scores_and_records_are_written_as_they_are_exported(engine: Engine, place: Place) -> None:
    items = make_items(5)
    for spec, name in ((SCORES, "scores"), (RECORDS, "records")):
        submit(engine, items, spec=spec, output_url=f"{place.url}/{name}")
        finish_all(engine)
    scores = read_table(f"{place.url}/scores").to_pylist()
    for row, item in zip(scores, items, strict=True):
        numbers = numbers_of(item.text)
        assert list(row["probabilities"].values()) == pytest.approx(numbers.tolist())
        assert row["label"] == SCORES.labels[int(numbers.argmax())]
    outputs = [json.loads(row["output"]) for row in read_table(f"{place.url}/records").to_pylist()]
    assert outputs == [records_of(item.text) for item in items]


# -- a store that fails ---------------------------------------------------------------------------------------------


@pytest.fixture
def faulty(bucket: Double) -> Callable[[str, int], None]:
    """Makes every request of a method be answered by a status until it is told 200."""

    def fail(method: str, status: int) -> None:
        bucket.fault = lambda asked, path: status if status != 200 and asked == method else None

    return fail


@pytest.mark.parametrize(("method", "status"), [("PUT", 403), ("PUT", 503), ("GET", 403), ("GET", 500)])
def test_a_store_that_refuses_holds_its_chunks_back_and_says_so_until_it_is_well(
    engine: Engine, bucket: Double, faulty: Callable[[str, int], None], method: str, status: int
) -> None:
    bucket.put("bucket/in.jsonl", b'{"id": "a", "body": "one"}\n')
    job = submit_rows(engine, "s3://bucket/in.jsonl", "s3://bucket/out")
    faulty(method, status)
    with encoding_chunks(engine) as encoder:
        (dispatch,) = dispatch_all(engine)
        result = encoder.encode_chunk(dispatch.chunk_id)
        assert result["outcome"] == "no storage"
        row = execute(engine, "SELECT state, attempt, error FROM vectormill.chunks").one()
        assert (row.state, row.attempt) == ("pending", 0)
        assert row.error.startswith("s3://bucket/")
        faulty(method, 200)
        ended, _ = run_to_end(engine, encoder, job)
    assert ended.state == "completed"
    keep_outputs(engine)
    assert_vectors("s3://bucket/out", [Item("a", b"one")])


def test_results_that_were_staged_although_the_answer_was_lost_are_swept(
    engine: Engine, bucket: Double
) -> None:
    items = make_items(2)
    job = submit(engine, items, output_url="s3://bucket/out")
    bucket.after = lambda method, path: 500 if method == "PUT" and "_staged" in path else None
    with encoding_chunks(engine) as encoder:
        (dispatch,) = dispatch_all(engine)
        assert encoder.encode_chunk(dispatch.chunk_id)["outcome"] == "no storage"
        bucket.after = lambda method, path: None
        run_to_end(engine, encoder, job)
    assert len([path for path in bucket.objects if "_staged" in path]) == 2
    keep_outputs(engine)
    assert not [path for path in bucket.objects if "_staged" in path]
    assert_vectors("s3://bucket/out", items)


def test_a_manifest_that_the_store_refuses_is_written_when_it_is_well(engine: Engine, bucket: Double) -> None:
    items = make_items(2)
    submit(engine, items, output_url="s3://bucket/out")
    for dispatch in dispatch_all(engine):
        claimed = claim(engine, dispatch.chunk_id)
        assert claimed is not None
        finish(engine, claimed)
    bucket.fault = lambda method, path: 403 if path.endswith(MANIFEST) else None
    assert keep_outputs(engine) == 1
    with engine.begin() as connection:
        row = connection.execute(text("SELECT state, last_error FROM vectormill.job_outputs")).one()
        assert row.state == CLOSING
        assert "s3://bucket/out/_manifest.json" in row.last_error
        connection.execute(text("UPDATE vectormill.job_outputs SET available_at = now()"))
    bucket.fault = lambda method, path: None
    assert keep_outputs(engine) == 2
    assert_vectors("s3://bucket/out", items)


def test_the_results_of_chunks_are_joined_in_their_order_up_to_a_size(engine: Engine, place: Place) -> None:
    items = make_items(23)
    job = submit(engine, items, output_url=f"{place.url}/out", chunk_max_items=2)
    with encoding_chunks(engine) as encoder:
        run_to_end(engine, encoder, job)
    with engine.begin() as connection:
        sizes = connection.execute(text("SELECT num_bytes FROM vectormill.output_parts")).scalars().all()
        fifth = text("UPDATE vectormill.output_parts SET num_bytes = 1 << 30 WHERE first_item = 8")
        connection.execute(fifth)
    assert len(sizes) == 12
    keep_outputs(engine, part_bytes=3 * max(sizes))
    rows = [part.num_rows for part in read_manifest(f"{place.url}/out").parts]
    assert rows == [6, 2, 2, 6, 6, 1]
    assert len([name for name in place.names() if "part-" in name]) == 6
    assert_vectors(f"{place.url}/out", items)


def test_an_output_that_an_older_release_has_begun_has_each_row_once_when_it_is_closed(
    engine: Engine, place: Place
) -> None:
    items = make_items(6)
    submit(engine, items, output_url=f"{place.url}/out", chunk_max_items=2)
    encode_waiting(engine)
    # That release wrote the results of the first chunk where readers look, twice; once its lease was lost.
    with engine.begin() as connection:
        staged = (
            connection.execute(text("SELECT name FROM vectormill.output_parts ORDER BY name"))
            .scalars()
            .first()
        )
        values = {"staged": staged, "name": name_part(str(staged))}
        connection.execute(
            text("UPDATE vectormill.output_parts SET name = :name WHERE name = :staged"), values
        )
    for name in (values["name"], "part-000000000000-1-9.parquet"):
        place.write(f"out/{name}", place.read(f"out/{staged}"))
    assert keep_outputs(engine, grace_seconds=3600, part_bytes=1 << 20) == 1
    parts = [name.removeprefix("out/") for name in place.names() if name.endswith(".parquet")]
    assert parts == [part.name for part in read_manifest(f"{place.url}/out").parts]
    assert len(parts) == 2
    assert_vectors(f"{place.url}/out", items)


def test_batches_of_an_output_come_one_row_group_at_a_time(engine: Engine, tmp_path: Path) -> None:
    submit(engine, make_items(10), output_url=f"file://{tmp_path}/out")
    for dispatch in dispatch_all(engine):
        claimed = claim(engine, dispatch.chunk_id)
        assert claimed is not None
        finish(engine, claimed)
    keep_outputs(engine)
    batches = list(read_batches(str(tmp_path / "out"), columns=["key"]))
    assert [batch.num_rows for batch in batches] == [4, 4, 2]
    assert batches[0].schema.names == ["key"]


def test_a_row_group_of_joined_parts_is_bounded_by_what_its_rows_take_in_memory(
    engine: Engine, tmp_path: Path
) -> None:
    metadata = json.dumps({"page": "a" * 50_000}).encode()
    items = [replace(item, metadata=metadata) for item in make_items(8)]
    job = submit(engine, items, output_url=f"file://{tmp_path}/out", chunk_max_items=1)
    with encoding_chunks(engine) as encoder:
        run_to_end(engine, encoder, job)
    keep_outputs(engine, part_bytes=100_000)
    (part,) = read_manifest(f"{tmp_path}/out").parts  # zstd makes a thousandth of the rows
    groups = pq.ParquetFile(tmp_path / "out" / part.name).metadata
    assert [groups.row_group(number).num_rows for number in range(groups.num_row_groups)] == [2, 2, 2, 2]
    assert_vectors(f"{tmp_path}/out", items)


def test_a_small_output_does_not_wait_behind_a_large_one(
    engine: Engine, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("large", "small"):
        submit(engine, make_items(1), output_url=f"{place.url}/{name}")
    encode_waiting(engine)
    may_end, is_closed = threading.Event(), threading.Event()

    def close(held: HeldOutput, grace_seconds: float) -> None:
        if held.url.endswith("large"):
            may_end.wait(30)
        else:
            is_closed.set()

    monkeypatch.setattr(loops, "close_output", close)
    url = engine.url.render_as_string(hide_password=False)
    with OutputLoop(url, Settings(), "test"):
        try:
            assert is_closed.wait(10)
        finally:
            may_end.set()
