"""Jobs from and into servers that others wrote: moto for s3://, Azurite for az://, each in a process of its own."""

import base64
import hashlib
import hmac
import io
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Final

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from indexer.loops import OutputLoop
from tests.database import ask, execute
from tests.environments import make_environment, make_node_package
from tests.integration.objects.test_outputs import assert_vectors, submit_rows
from tests.lake import configured_catalog
from tests.obedient_engine import encoding_chunks, run_to_end
from tests.protocol import dispatch_all, make_items, submit
from tests.waiting import wait_for
from vectormill.domain.errors import OutputTaken, StorageUnavailable
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.item import INPUT_CHANGED, Item
from vectormill.jobs.jobs import find_job
from vectormill.objects import reference, store
from vectormill.objects.store import describe_object, list_folder, write_object
from vectormill.processes.lifetimes import free_port
from vectormill.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first run installs the servers

MOTO: Final = "moto[server]==5.2.5"
AZURITE: Final = "3.37.0"
# Every emulator of Azure has this account, as its documentation says.
ACCOUNT: Final = "devstoreaccount1"
ACCOUNT_KEY: Final = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextmanager
def running(*command: str) -> Iterator[str]:
    """Start a server whose last argument is a port, and yield its URL once it answers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(url, trust_env=False).status_code > 0
        except httpx.TransportError:
            return False

    with subprocess.Popen(
        (*command, str(port)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_for(answers, 60, f"{command[0]} answers")
            yield url
        finally:
            process.terminate()


def make_container(url: str) -> None:
    """Create a container by a request with a shared key, since obstore creates none."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = [
        "PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items()),
        f"/{ACCOUNT}/{ACCOUNT}/box", "restype:container",
    ]  # fmt: skip
    signed = hmac.digest(base64.b64decode(ACCOUNT_KEY), "\n".join(lines).encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
    where = f"{url}/{ACCOUNT}/box?restype=container"
    httpx.put(where, headers=headers, trust_env=False).raise_for_status()


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    program = make_node_package("azurite", AZURITE) / "dist" / "src" / "blob" / "main.js"
    options = ("--inMemoryPersistence", "--disableTelemetry", "--silent", "--skipApiVersionCheck")
    with running("node", str(program), *options, "--blobPort") as url:
        make_container(url)
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", url)
        yield "az://box"


@pytest.fixture
def amazon(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    python = make_environment("moto", (MOTO,))
    with running(str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p") as url:
        httpx.put(f"{url}/box", trust_env=False).raise_for_status()
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield "s3://box"


@pytest.fixture(params=["amazon", "azure"])
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket or container of each server."""
    monkeypatch.setattr(reference, "ROW_GROUPS", reference.RowGroups())
    monkeypatch.setattr(store, "STORE_OPTIONS", {"retry_config": {"max_retries": 0}})
    store.open_store.cache_clear()
    yield request.getfixturevalue(request.param)
    store.open_store.cache_clear()


def keep(engine: Engine) -> None:
    """Close and sweep outputs, as an indexer does."""
    url = engine.url.render_as_string(hide_password=False)
    keeper = OutputLoop(url, Settings(output_grace_seconds=1e-6), "test")

    def is_swept() -> bool:
        """Take a step; a store tells the age of objects in whole seconds, so that the sweep may have to wait."""
        execute(engine, "UPDATE vectormill.job_outputs SET available_at = now()")
        keeper.step()
        states = execute(engine, "SELECT state FROM vectormill.job_outputs").scalars().all()
        return set(states) == {"swept"}

    wait_for(is_swept, 20, "outputs are swept")
    keeper.close()


def names_of(url: str) -> list[str]:
    return sorted(each.url.removeprefix(f"{url}/") for each in list_folder(url, ANYWHERE))


def write_inputs(box: str) -> list[Item]:
    """Write a file of lines and a Parquet file, whose name has characters of every kind, and return their items."""
    items = [Item(f"k{number}", f"text {number}".encode()) for number in range(12)]
    rows = [{"id": item.key, "body": item.text.decode()} for item in items]
    write_object(f"{box}/in/a.jsonl", "\n".join(map(json.dumps, rows[:6])).encode(), ANYWHERE)
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows[6:]), sink, row_group_size=4)
    write_object(f"{box}/in/b ü+100%.parquet", sink.getvalue(), ANYWHERE)
    return items


def test_a_job_goes_from_a_store_into_a_store_and_leaves_nothing_over(engine: Engine, box: str) -> None:
    items = write_inputs(box)
    out = f"{box}/out"
    listed = {each.url: each for each in list_folder(f"{box}/in", ANYWHERE)}
    assert listed == {url: describe_object(url, ANYWHERE) for url in listed}, (
        "entity tags are the same in a list"
    )
    job = submit_rows(engine, f"{box}/in/*", out)
    with pytest.raises(OutputTaken):
        submit(engine, make_items(1), output_url=out)
    write_object(f"{out}/_staged/of-a-lost-lease.rows", b"never counted", ANYWHERE)
    with encoding_chunks(engine) as encoder:
        ended, _ = run_to_end(engine, encoder, job)
    assert (ended.state, ended.num_done) == ("completed", 12)
    keep(engine)
    assert_vectors(out, items)
    assert len(set(names_of(out)) - {"_job.json", "_manifest.json"}) == 1
    assert names_of(f"{box}/in") == ["a.jsonl", "b ü+100%.parquet"]


def test_an_object_that_changed_is_noticed_by_its_entity_tag(engine: Engine, box: str) -> None:
    write_inputs(box)
    job = submit_rows(engine, f"{box}/in/*.jsonl", f"{box}/out", most=6)
    write_object(f"{box}/in/a.jsonl", b'{"id": "k0", "body": "another"}\n' * 6, ANYWHERE)
    with encoding_chunks(engine) as encoder:
        (dispatch,) = dispatch_all(engine)
        # The chunk is split down to the items, each of which fails.
        assert encoder.encode_chunk(dispatch.chunk_id)["code"] == INPUT_CHANGED
    assert ask(engine, find_job, job.id).num_failed == 6


def test_a_store_that_is_not_there_is_told_by_name(box: str) -> None:
    with pytest.raises(StorageUnavailable, match=r"://none/out"):
        list(list_folder(f"{box.partition('://')[0]}://none/out", ANYWHERE))


def test_a_table_of_iceberg_in_a_bucket_gets_the_parts(
    engine: Engine, amazon: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.open_store.cache_clear()
    items = make_items(9)
    properties = {
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"{amazon}/warehouse",
        "s3__endpoint": os.environ["AWS_ENDPOINT_URL"],
        "s3__region": "us-east-1",
    }
    with configured_catalog(monkeypatch, **properties) as catalog:
        job = submit(engine, items, output_url="iceberg://lake/papers.vectors")
        with encoding_chunks(engine) as encoder:
            run_to_end(engine, encoder, job)
        keep(engine)
        table = catalog.load_table("papers.vectors")
        assert str(table.location()).startswith("s3://box/warehouse/")
        url = str(ask(engine, find_job, job.id).output_url)
        assert_vectors(url, items)
        assert sorted(table.scan().to_arrow()["key"].to_pylist()) == sorted(item.key for item in items)
    store.open_store.cache_clear()
