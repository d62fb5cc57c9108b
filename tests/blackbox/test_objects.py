"""Texts in object storage become Parquet there, whole and without leftovers, whatever is killed meanwhile."""

import json
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.blackbox.service import Service, assert_close, wait_for

NUM_ITEMS = 600


@pytest.mark.parametrize("victim", ["worker.app", "indexer", "everything"])
def test_an_output_has_each_row_once_and_nothing_else_whoever_was_killed(
    service: Service, name: str, victim: str
) -> None:
    texts = {f"k{n}": f"{name} {n} " + "some words of text " * 8 for n in range(NUM_ITEMS)}
    folder, out = service.folder / "in" / name, service.folder / "out" / name
    folder.mkdir(parents=True)
    table = pa.table({"id": list(texts), "body": list(texts.values())})
    pq.write_table(table.slice(0, 400), folder / "0.parquet", row_group_size=150)
    pq.write_table(table.slice(400), folder / "1.parquet")
    body = {
        "input": {"urls": [f"file://{folder}/*.parquet"], "text": "body", "key": "id"},
        "to": f"file://{out}",
    }
    job = service.ask("POST", "/v1/jobs", 202, json=body)["id"]
    wait_for(lambda: service.ask("GET", f"/v1/jobs/{job}")["num_done"] > 0, "the first parts are there")
    with service.frozen():
        if victim == "everything":
            service.kill()
        else:
            process = service.processes(victim)[0]
            process.kill()
            psutil.wait_procs([process], timeout=60)
    if service.process is None:
        service.start()
    ended = service.wait(job, 300)
    assert (ended["state"], ended["num_done"]) == ("completed", NUM_ITEMS)
    wait_for(
        lambda: service.ask("GET", f"/v1/jobs/{job}")["output"]["state"] == "swept", "the output is swept"
    )
    manifest = json.loads((out / "_manifest.json").read_text())
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith("_"))
    assert names == sorted(part["name"] for part in manifest["parts"])
    rows = read_rows(out, names)
    assert sorted(rows) == sorted(texts)
    assert_close(rows["k599"].tolist(), service.embed([texts["k599"]])[0])


def read_rows(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    """The vectors of all parts by key; no key may come twice."""
    rows: dict[str, np.ndarray] = {}
    for each in names:
        for row in pq.read_table(folder / each).to_pylist():
            assert row["key"] not in rows
            rows[row["key"]] = np.array(row["embedding"])
    return rows
