"""The demo of `vectormill demo --to`: texts from Parquet by reference, vectors to Parquet, read back and searched."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vectormill.cli.demos import NEAREST, POLL_SECONDS, QUERIES, first_line
from vectormill.cli.exits import ITEMS_FAILED, CommandFailed
from vectormill.cli.jobs import watch_job
from vectormill.cli.printing import print_json, print_report, tell
from vectormill.domain.errors import InvalidOption, Unavailable

if TYPE_CHECKING:
    from vectormill.client import Client
    from vectormill.files.ndjson import ItemJson

TEXTS: Final = "texts"
VECTORS: Final = "vectors"
ROWS_PER_OBJECT: Final = 5000
# The states of an output in which its manifest has been written.
CLOSED: Final = ("closed", "sweeping", "swept")
CLOSE_SECONDS: Final = 60.0


def prepare_folder(folder: Path) -> Path:
    """Create the demo's folder, or use an empty one, and return its full path. Raise InvalidOption otherwise."""
    folder = folder.expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidOption(f"{folder} is not an empty folder; --to needs one for the texts and the vectors.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_texts(folder: Path, items: "list[ItemJson]") -> list[Path]:
    """Write the texts as Parquet files with the columns id, body and line, and return their paths."""
    import pyarrow as pa

    from vectormill.files.parquet import open_writer

    target = folder / TEXTS
    target.mkdir()
    paths = []
    for start in range(0, len(items), ROWS_PER_OBJECT):
        rows = items[start : start + ROWS_PER_OBJECT]
        table = pa.table(
            {
                "id": [row["key"] for row in rows],
                "body": [row["text"] for row in rows],
                "line": [first_line(row["text"]) for row in rows],
            }
        )
        paths.append(target / f"{start // ROWS_PER_OBJECT:04d}.parquet")
        with open_writer(paths[-1], table.schema) as writer:
            writer.write_table(table)
    return paths


def run_objects_demo(
    client: "Client", folder: Path, items: "list[ItemJson]", model: str | None, *, is_json: bool
) -> None:
    """Run the demo on a service that may read and write below `folder`.

    Raise CommandFailed unless the output has one row for each text.
    """
    from vectormill.objects.manifest import read_manifest, read_table

    paths = write_texts(folder, items)
    tell(f"Wrote {len(items):,} texts as {len(paths)} Parquet files into {folder / TEXTS}.")
    out = f"file://{folder / VECTORS}"
    submitted = client.submit_objects(
        f"file://{folder / TEXTS}/*.parquet",
        text="body",
        key="id",
        metadata=["line"],
        model=model,
        to=out,
    )
    tell(f"Submitted {submitted['num_items']:,} rows by reference as job {submitted['id']}.")
    job = watch_job(client, submitted, poll_seconds=POLL_SECONDS)
    wait_until_closed(client, job["id"])
    manifest, table = read_manifest(out), read_table(out)
    keys = table.column("key").to_pylist()
    searches = search_table(client, table, model) if keys else {}
    if is_json:
        print_json(
            {"job": job, "num_vectors": len(keys), "num_parts": len(manifest.parts), "searches": searches}
        )
    else:
        for query, matches in searches.items():
            rows = [(f"{match['score']:.3f}", match["key"], match["line"]) for match in matches]
            print_report(f"Nearest to: {query}", ("score", "docstring of", "first line"), rows)
        tell(f"{len(keys):,} of {len(items):,} texts have their vector, in {len(manifest.parts)} parts:")
        tell(f'    vectormill.read_table("{out}")')
    if sorted(keys) != sorted(item["key"] for item in items):
        reason = f"The rows of {out} are not those of the texts; job {job['id']} {job['state']}."
        raise CommandFailed(reason, ITEMS_FAILED)


def wait_until_closed(client: "Client", job_id: str) -> None:
    """Wait until the indexer has written the manifest of an ended job. Raise Unavailable after a minute."""
    until = time.monotonic() + CLOSE_SECONDS
    while (output := client.job(job_id)["output"]) is not None and output["state"] not in CLOSED:
        if time.monotonic() > until:
            raise Unavailable(f"The manifest of {output['url']} is not there; is an indexer running?")
        time.sleep(POLL_SECONDS)  # the API has no event for the end of an output, so poll


def search_table(client: "Client", table: Any, model: str | None) -> dict[str, list[dict[str, Any]]]:
    """Return the nearest rows of an output for each query, compared in this process."""
    import numpy as np

    found = {}
    vectors = np.stack(table.column("embedding").to_numpy(zero_copy_only=False))
    queries = client.embed(QUERIES, model=model)
    for query, vector in zip(QUERIES, queries, strict=True):
        scores = vectors @ vector
        found[query] = [
            {
                "key": table.column("key")[row].as_py(),
                "score": float(scores[row]),
                "line": json.loads(table.column("metadata")[row].as_py())["line"],
            }
            for row in np.argsort(-scores)[:NEAREST].tolist()
        ]
    return found
