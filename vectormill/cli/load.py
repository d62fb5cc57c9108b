"""Commands that load the output of a job from an object store into Qdrant, LanceDB or Postgres."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import typer

from vectormill.cli.command import command
from vectormill.cli.printing import tell
from vectormill.extras import require

if TYPE_CHECKING:
    from vectormill.client.progress import ProgressView
    from vectormill.objects.loading.load import OpenTarget

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill load pgvector s3://bucket/vectors --database-url postgresql://host/db --table papers",
    help="Load the output of a job from a folder of an object store into another store.",
)

# The packages that are needed to read an output; the extra of each target includes them.
READING: Final = ("obstore", "pyarrow")


def show_loaded(loaded: Mapping[str, Any]) -> None:
    seconds = loaded["seconds"]
    typer.echo(
        f"{loaded['num_rows']:,} rows of {loaded['folder']} in {loaded['target']}; {seconds:,.1f} s, "
        f"{loaded['num_rows'] / max(seconds, 1e-6):,.0f} rows/s."
    )
    if loaded["num_failed"]:
        tell(f"{loaded['num_failed']:,} items of job {loaded['job_id']} failed and have no row.")


@command(
    app,
    "vectormill load qdrant s3://bucket/vectors --url http://localhost:6333 --collection papers",
    "vectormill load qdrant ./vectors --path ./qdrant --collection papers",
    note="The id of a point is uuid.uuid5(uuid.NAMESPACE_URL, key); its payload has the key and the metadata.",
    view=show_loaded,
)
def qdrant(
    folder: str,
    *,
    collection: str,
    url: str | None = None,
    path: Path | None = None,
    distance: Literal["cosine", "dot", "euclid", "manhattan"] | None = None,
    api_key_file: Path | None = None,
) -> Mapping[str, Any]:
    """Load vectors into a collection of Qdrant, which is created if it is not there.

    Points of equal keys are replaced, so the command can be repeated.

    Args:
        collection (NAME): The collection to load into.
        url (URL): The server to load into.
        path (DIR): The folder of Qdrant's local mode to load into, instead of a server.
        distance: How a new collection compares vectors. By default cosine if they have length 1, else dot.
        api_key_file (FILE): A file with the server's API key.
    """
    require("qdrant_client", *READING, extra="qdrant")
    from vectormill.objects.loading.qdrant import QdrantPlace, open_qdrant

    api_key = None if api_key_file is None else api_key_file.read_text(encoding="utf-8").strip()
    place = QdrantPlace(collection, url, path, api_key)
    return load(
        folder, lambda spec, schema: open_qdrant(place, spec, distance), f"{collection} of {place.address}"
    )


@command(
    app,
    "vectormill load lancedb s3://bucket/vectors --uri ./lance --table papers",
    "vectormill load lancedb ./vectors --uri s3://bucket/lance --table papers",
    view=show_loaded,
)
def lancedb(folder: str, *, uri: str, table: str) -> Mapping[str, Any]:
    """Load vectors, scores or records into a table of LanceDB, which is created if it is not there.

    The table has the columns of the output. Rows of equal keys are replaced, so the command can be repeated.

    Args:
        uri (URI): The database to load into: a local folder, or a URL that LanceDB knows.
        table (NAME): The table to load into.
    """
    require("lancedb", *READING, extra="lancedb")
    from vectormill.objects.loading.lancedb import open_lancedb

    return load(folder, lambda spec, schema: open_lancedb(uri, table, schema), f"{table} of {uri}")


@command(
    app,
    "vectormill load pgvector s3://bucket/vectors --database-url postgresql://host/db --table papers",
    note="Leave the password out of the URL: libpq reads it from PGPASSWORD or ~/.pgpass.",
    view=show_loaded,
)
def pgvector(folder: str, *, database_url: str, table: str) -> Mapping[str, Any]:
    """Load vectors, scores or records into a table of Postgres with pgvector, which is created if it is not there.

    The table has the columns key, the result (embedding; or score, label, probabilities; or output) and metadata.
    Rows of equal keys are replaced, so the command can be repeated.

    Args:
        database_url (URL): The database to load into.
        table (NAME): The table to load into. May have a schema: SCHEMA.NAME.
    """
    require("psycopg", *READING, extra="all")
    from vectormill.objects.loading.pgvector import open_postgres

    return load(folder, lambda spec, schema: open_postgres(database_url, table, spec), f"table {table}")


def load(folder: str, open_target: "OpenTarget", target: str) -> Mapping[str, Any]:
    """Load the output in a folder, show the progress, and return what was loaded."""
    from vectormill.client.progress import Progress
    from vectormill.objects.loading.load import load_output

    url = folder if "://" in folder else str(Path(folder).absolute())
    with Progress(look_at_load) as progress:
        loaded = load_output(url, open_target, lambda done: progress(asdict(done)))
    return {"folder": folder, "target": target, **asdict(loaded)}


def look_at_load(loaded: Mapping[str, Any]) -> "ProgressView":
    """Return how much of an output is loaded, at which rate, and in how many seconds the rest will be."""
    from vectormill.client.progress import ProgressView, describe_seconds

    num_loaded, num_rows = loaded["num_loaded"], loaded["num_rows"]
    parts = [f"{num_loaded:,} of {num_rows:,} rows"]
    if num_loaded:
        rate = num_loaded / max(loaded["seconds"], 1e-6)
        parts.append(f"{rate:,.0f}/s")
        if num_loaded < num_rows:
            parts.append(f"{describe_seconds((num_rows - num_loaded) / rate)} left")
    return ProgressView("loading", " · ".join(parts), num_loaded / num_rows if num_rows else None)
