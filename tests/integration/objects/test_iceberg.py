"""Results into tables of Iceberg: each part is added once, whatever fails in between, by the real pyiceberg."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import httpx
import pytest
from sqlalchemy import Engine

from indexer.loops import OutputLoop
from tests.api_server import SMALL, api_client, assert_problem
from tests.architecture.sources import ROOT
from tests.database import ask, execute
from tests.environments import make_cluster_variables
from tests.integration.objects.test_api_objects import encode_all
from tests.kinds import RECORDS, SCORES
from tests.lake import configured_catalog, find_pyiceberg
from tests.obedient_engine import FussyEngine, encoding_chunks, run_to_end
from tests.outputs import encode
from tests.protocol import SPEC, make_items, submit, vector_of
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, SpecMismatch, StorageUnavailable, VectormillError
from vectormill.jobs.item import Item
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import find_job, retry_job
from vectormill.objects import parts
from vectormill.objects.iceberg import JOB_PROPERTY, add_parts
from vectormill.objects.manifest import make_part_schema, read_table
from vectormill.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first run installs the package

SCRIPT: Final = Path(__file__).with_name("read_elsewhere.py")
URL: Final = "iceberg://lake/papers.vectors"
# Claims an output as the indexer does, and is killed once its table has it and before Postgres knows.
KILLED: Final = """
import os, signal, sys
from pathlib import Path
from vectormill.objects import parts
from vectormill.settings import Settings
from indexer.loops import OutputLoop
parts._write_manifest = lambda *rest: os.kill(os.getpid(), signal.SIGKILL)
OutputLoop(sys.argv[1], Settings(lease_seconds=30), "killed").step()
"""


@pytest.fixture(params=["sqlite"])
def catalog(
    request: pytest.FixtureRequest, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A catalog whose tables lie below the test's folder."""
    uri = f"sqlite:///{tmp_path}/catalog.db" if request.param == "sqlite" else database_url
    monkeypatch.setenv("VECTORMILL_OUTPUT_ROOT", str(tmp_path))
    monkeypatch.setenv("PYICEBERG_CATALOG__GONE__URI", "postgresql+psycopg://127.0.0.1:1/gone")
    with configured_catalog(monkeypatch, uri=uri, warehouse=f"file://{tmp_path}/warehouse") as lake:
        yield lake


def keep(engine: Engine, rounds: int = 10) -> str:
    """Close and sweep outputs as an indexer does, without waiting for backoffs, and return the state of the last."""
    url = engine.url.render_as_string(hide_password=False)
    keeper = OutputLoop(url, Settings(output_grace_seconds=1e-6), "test")
    for _ in range(rounds):
        execute(engine, "UPDATE vectormill.job_outputs SET available_at = now()")
        if not keeper.step():
            break
    keeper.close()
    return str(execute(engine, "SELECT state FROM vectormill.job_outputs").scalars().all()[-1])


def rows_of(catalog: Any) -> dict[str, list[float]]:
    """Return the vectors of the table by key; each key must be there once."""
    table = catalog.load_table("papers.vectors").scan().to_arrow()
    assert table.num_rows == len(set(table.column("key").to_pylist()))
    return {row["key"]: row["embedding"] for row in table.to_pylist()}


def vectors_of(items: list[Item]) -> dict[str, list[float]]:
    return {item.key: vector_of(item.text).tolist() for item in items}


def jobs_of(catalog: Any) -> list[str]:
    """Return the job of each snapshot, in their order."""
    return [each.summary[JOB_PROPERTY] for each in catalog.load_table("papers.vectors").snapshots()]


@pytest.mark.parametrize("catalog", ["sqlite", "postgres"], indirect=True)
def test_each_job_becomes_one_snapshot_of_a_table_that_the_first_one_creates(
    engine: Engine, catalog: Any
) -> None:
    items = [Item("k'ü", b"one", b'{"lang": "de"}'), *make_items(10, "m")]
    jobs = []
    for part in (items[:6], items[6:]):
        job = submit(engine, part, output_url=URL, chunk_max_items=2)
        jobs.append(job)
        shown = ask(engine, find_job, job.id)
        assert (shown.output_table, shown.output_error) == (URL, None)
        assert str(shown.output_url).endswith(f"/papers/vectors/data/vectormill-{job.id}")
        assert len(jobs_of(catalog)) == len(jobs) - 1, "nothing is added before the job has ended"
        encode(engine, job)
        assert keep(engine) == "swept"
        assert len([*folder_of(engine, job).glob("part-*")]) == 1, "the results of three chunks"
        assert read_table(str(shown.output_url)).column("key").to_pylist() == [item.key for item in part]
    assert jobs_of(catalog) == [str(job.id) for job in jobs]
    assert rows_of(catalog) == vectors_of(items)
    table = catalog.load_table("papers.vectors").scan(row_filter="key = 'k''ü'").to_arrow().to_pylist()
    assert [(row["metadata"], row["content_hash"]) for row in table] == [
        ('{"lang": "de"}', items[0].content_hash())
    ]


def folder_of(engine: Engine, job: Job) -> Path:
    return Path(str(ask(engine, find_job, job.id).output_url).removeprefix("file://"))


@pytest.mark.parametrize(
    "spec",
    [SPEC, replace(SPEC, vector_type="int8"), replace(SPEC, vector_type="binary"), SCORES, RECORDS],
    ids=["vectors", "int8", "binary", "scores", "records"],
)
def test_a_table_has_the_values_that_the_parts_have(engine: Engine, catalog: Any, spec: EncodingSpec) -> None:
    job = submit(engine, make_items(5), spec=spec, output_url=URL)
    encode(engine, job)
    assert keep(engine) == "swept"
    parts = read_table(str(ask(engine, find_job, job.id).output_url))
    assert parts.schema == make_part_schema(spec), "also where the table has other types"
    table = catalog.load_table("papers.vectors")
    assert table.scan().to_arrow().to_pylist() == parts.to_pylist()
    # Daft finds columns only by field ids, and Polars' own reader compares types.
    for program in ("iceberg with daft", "iceberg with polars"):
        done = subprocess.run(
            (sys.executable, SCRIPT, program, table.metadata_location),
            env=make_cluster_variables("daft", find_pyiceberg()), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        expected = [{**row, "content_hash": list(row["content_hash"])} for row in parts.to_pylist()]
        assert json.loads(done.stdout.splitlines()[-1]) == expected, program


def test_a_kill_after_the_commit_of_the_table_adds_nothing_twice(engine: Engine, catalog: Any) -> None:
    items = make_items(6)
    job = submit(engine, items, output_url=URL, chunk_max_items=2)
    encode(engine, job)
    url = engine.url.render_as_string(hide_password=False)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{find_pyiceberg()}"}
    killed = subprocess.run(
        (sys.executable, "-c", KILLED, url), env=environment, capture_output=True, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert ask(engine, find_job, job.id).output_state == "closing"
    execute(engine, "UPDATE vectormill.job_outputs SET lease_until = now()")
    assert rows_of(catalog) == vectors_of(items)
    assert keep(engine) == "swept"
    assert jobs_of(catalog) == [str(job.id)]
    assert rows_of(catalog) == vectors_of(items)


@pytest.mark.parametrize("since", ["nothing", "killed", "compacted"])
def test_a_retry_adds_only_what_failed_before(engine: Engine, catalog: Any, since: str) -> None:
    items = [*make_items(5), Item("blank", b" "), Item("last", b"text")]
    job = submit(engine, items, output_url=URL, chunk_max_items=2)
    fussy = FussyEngine()
    with encoding_chunks(engine, fussy) as encoder:
        run_to_end(engine, encoder, job)
        if since == "killed":
            # The table has the parts, and no manifest says so.
            with patch.object(parts, "_write_manifest", side_effect=StorageUnavailable):
                assert keep(engine, rounds=1) == "closing"
        else:
            assert keep(engine) == "swept"
        table = catalog.load_table("papers.vectors")
        assert "blank" not in rows_of(catalog)
        if since == "compacted":
            # Somebody writes all rows into new files, and forgets the snapshots that had the old ones.
            table.overwrite(table.scan().to_arrow())
            table.refresh()
            former = [each.snapshot_id for each in table.snapshots()][:-1]
            table.maintenance.expire_snapshots().by_ids(former).commit()
        fussy.is_fussy = False
        ask(engine, retry_job, job.id)
        run_to_end(engine, encoder, job)
    assert keep(engine) == "swept"
    assert rows_of(catalog) == vectors_of(items)
    if since != "compacted":
        assert jobs_of(catalog) == [str(job.id)] * 2
    assert len(read_table(str(ask(engine, find_job, job.id).output_url))) == 7


def test_whoever_is_overtaken_by_another_commit_looks_again_what_is_missing(
    engine: Engine, catalog: Any
) -> None:
    items = make_items(4)
    job = submit(engine, items, output_url=URL)
    encode(engine, job)
    with patch.object(parts, "add_parts", side_effect=StorageUnavailable):
        assert keep(engine, rounds=1) == "closing"
    folder = folder_of(engine, job)
    paths = [f"file://{path}" for path in folder.glob("part-*")]
    assert len(paths) == 1

    def overtake() -> None:
        """Add the same parts, as an indexer does that has claimed the output meanwhile."""
        assert add_parts(URL, job.id, paths, lambda: None) == 1

    with pytest.raises(StorageUnavailable, match="CommitFailedException"):
        add_parts(URL, job.id, paths, overtake)
    assert add_parts(URL, job.id, paths, lambda: None) == 0
    assert keep(engine) == "swept"
    assert rows_of(catalog) == vectors_of(items)
    assert jobs_of(catalog) == [str(job.id)]


def test_the_sweep_leaves_the_files_of_the_table(engine: Engine, catalog: Any) -> None:
    job = submit(engine, make_items(4), output_url=URL, chunk_max_items=2)
    encode(engine, job)
    folder = folder_of(engine, job)
    (folder / "_staged" / "of-a-lost-lease.rows").write_bytes(b"")
    assert keep(engine) == "swept"
    assert not [*folder.glob("_staged/*")]
    files = {
        Path(row["file_path"]).name
        for row in catalog.load_table("papers.vectors").inspect.files().to_pylist()
    }
    assert {path.name for path in folder.glob("part-*")} == files


def test_a_table_that_no_longer_fits_keeps_the_output_from_being_closed_and_says_why(
    engine: Engine, catalog: Any
) -> None:
    items = make_items(4)
    job = submit(engine, items, output_url=URL)
    from pyiceberg.types import StringType

    def change() -> Any:
        return catalog.load_table("papers.vectors").update_schema(allow_incompatible_changes=True)

    def assert_refused() -> None:
        assert keep(engine, rounds=1) == "closing"
        error = str(ask(engine, find_job, job.id).output_error)
        assert error.startswith("SpecMismatch: iceberg://lake/papers.vectors does not fit")

    encode(engine, job)
    with change() as update:
        update.add_column("owner", StringType(), required=True)
    assert_refused()
    with change() as update:
        update.make_column_optional("owner")
        update.rename_column("content_hash", "hash")
    assert_refused()
    with change() as update:
        update.rename_column("hash", "content_hash")
    assert keep(engine) == "swept"
    assert ask(engine, find_job, job.id).output_error is None
    assert rows_of(catalog) == vectors_of(items)


REFUSED: Final[dict[str, tuple[str, EncodingSpec, type[VectormillError], str]]] = {
    "half": (URL, replace(SPEC, vector_type="float16"), InvalidOption, "no half-precision numbers"),
    "catalog": ("iceberg://other/papers.vectors", SPEC, InvalidOption, "The catalog of .* is not configured"),
    "namespace": ("iceberg://lake/none.vectors", SPEC, InvalidOption, "Create the namespace first"),
    "outage": ("iceberg://gone/papers.vectors", SPEC, StorageUnavailable, "OperationalError.* port 1 failed"),
    "columns": (URL, SCORES, SpecMismatch, "does not fit the results of this job"),
    "partitions": ("iceberg://lake/papers.partitioned", SPEC, SpecMismatch, "is partitioned"),
    "place": ("iceberg://lake/papers.elsewhere", SPEC, InvalidOption, "VECTORMILL_OUTPUT_ROOT"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_table_cannot_take_is_refused_at_submission(engine: Engine, catalog: Any, name: str) -> None:
    submit(engine, make_items(1), output_url=URL)
    schema = catalog.load_table("papers.vectors").schema()
    partitioned = catalog.create_table("papers.partitioned", schema)
    with partitioned.update_spec() as update:
        update.add_identity("key")
    catalog.create_table("papers.elsewhere", schema, location="file:///elsewhere")
    url, spec, kind, sentence = REFUSED[name]
    with pytest.raises(kind, match=sentence):
        submit(engine, make_items(1), spec=spec, output_url=url)
    assert execute(engine, "SELECT count(*) FROM vectormill.jobs").scalar_one() == 1


def test_a_repeated_submission_is_the_same_job(engine: Engine, catalog: Any) -> None:
    first = submit(engine, make_items(1), output_url=URL, idempotency_key="once")
    assert submit(engine, make_items(1), output_url=URL, idempotency_key="once").id == first.id


def test_the_api_takes_a_table_shows_it_and_says_what_does_not_fit(
    engine: Engine, catalog: Any, tmp_path: Path
) -> None:
    items = [{"key": "a", "text": "one"}]
    with api_client(engine, output_root=tmp_path) as client:

        def post(to: str, **options: str) -> httpx.Response:
            return client.post("/v1/jobs", json={"items": items, "to": to, "options": SMALL | options})

        answer = post(URL)
        assert answer.status_code == 202, answer.text
        job = answer.json()
        assert (job["output"]["table"], job["output"]["error"]) == (URL, None)
        encode_all(engine, job["id"])
        assert client.get(f"/v1/jobs/{job['id']}").json()["output"]["state"] == "closed"
        assert rows_of(catalog) == {"a": vector_of(b"one").tolist()}
        half = post(URL, vector_type="float16")
        assert_problem(half, 422, "invalid-option", "no half-precision numbers")
        with catalog.load_table("papers.vectors").update_schema() as update:
            update.delete_column("metadata")
        assert_problem(post(URL), 409, "spec-mismatch", "does not fit the results of this job")
