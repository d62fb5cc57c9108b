"""The command that imports vectors which exist into a collection."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from vectormill.cli.collections import app
from vectormill.cli.command import Client, Names, command
from vectormill.cli.printing import tell
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import (
    CollectionInUse,
    CollectionNotFound,
    ConfigurationError,
    InvalidOption,
    SpecMismatch,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from sqlalchemy import Engine

    from vectormill.domain.encoding import EncodingSpec
    from vectormill.sources.reader import SourcePlace
    from vectormill.sources.vectors import ImportColumns, VectorRows, VectorSource

# The number of texts that workers encode, once of the first rows and once of all of them.
SAMPLE_TEXTS: Final = 100
# The weakest arithmetic of workers promises this cosine. Another prompt, pooling or model gives far less.
LEAST_COSINE: Final = 0.99
# The fields of a spec with which a job encodes a sample; the vectors of a sample are compared in float32.
SAMPLE_OPTIONS: Final = ("normalize", "dimensions", "prompt", "max_tokens", "long_texts", "passage_overlap")

Sample = list[tuple[str, str, "npt.NDArray[Any]"]]  # key, text and vector


def show_imported(imported: Mapping[str, Any]) -> None:
    typer.echo(
        f"{imported['num_imported']:,} of {imported['num_rows']:,} rows imported into {imported['collection']}; "
        f"{imported['seconds']:,.1f} s."
    )
    left = imported["num_rows"] - imported["num_imported"]
    if left:
        tell(f"{left:,} rows were left out: their keys are in the collection, occur twice, or were deleted.")
    if imported["num_without_vector"]:
        tell(f"{imported['num_without_vector']:,} rows have no vector and were left out.")
    if imported["smallest_cosine"] is not None:
        tell(
            f"Sampled texts agree with their vectors by a cosine of at least {imported['smallest_cosine']:.5f}."
        )


@command(
    app,
    "vectormill collections import articles --sql 'SELECT id, body, embedding FROM articles' --key id --text body "
    "--url-env ARTICLES_URL --model all-MiniLM-L6-v2",
    "vectormill collections import articles vectors.parquet --text text --model all-MiniLM-L6-v2 --dimensions 256",
    "vectormill collections import articles s3://bucket/vectors",
    name="import",
    view=show_imported,
)
def import_vectors(
    collection: str,
    source: str | None = None,
    *,
    sql: str | None = None,
    url_env: str | None = None,
    url_file: str | None = None,
    key: str = "key",
    vector: str = "embedding",
    text: str | None = None,
    metadata: Names | None = None,
    metadata_json: str | None = None,
    content_hash: str | None = None,
    model: str | None = None,
    options: EncodingOptions,
    keep_text: bool = False,
    unchecked: bool = False,
    again: bool = False,
    api_url: str | None = None,
    data_dir: Path | None = None,
) -> Mapping[str, Any]:
    """Import vectors that exist into a collection, which is created if it is not there.

    State the model and the options that made them. Their dimensions and lengths are checked, and workers encode a
    sample of the texts, which must agree. Rows whose keys are in the collection stay as they are, so the command can
    be repeated. It writes to the service's Postgres, and reads the source where it runs.

    Args:
        source ([SOURCE]): Parquet files, as a path, pattern or URL; or the folder with the output of a job, whose model
            and options are known.
        sql (QUERY): Read the rows of a query instead. A column of vectors has the type vector, halfvec or an array.
        url_env (VARIABLE): The environment variable with the URL of the query's database.
        url_file (FILE): The file with that URL. Without either, the service's own database is read.
        key (COLUMN): The column with the key.
        vector (COLUMN): The column with the vector.
        text (COLUMN): The column with the text. A later re-index encodes only rows whose text differs from it, and all
            rows that were imported without.
        metadata (COLUMN): A column to keep as metadata.
        metadata_json (COLUMN): The column with the metadata as JSON objects, instead of --metadata.
        content_hash (COLUMN): The column with the hashes of texts that Vectormill exported, for rows without texts.
        keep_text: Keep texts alongside their vectors, if the collection is created.
        unchecked: Do not encode a sample.
        again: Import into a collection that is older than a day. Rows that were deleted from it come back, if the
            source still has them.
    """
    from vectormill.cli import endpoint, keys
    from vectormill.collections.imports import find_import_target
    from vectormill.files.roots import ANYWHERE
    from vectormill.jobs.jobs import is_model_in_use
    from vectormill.models.registry import open_registry
    from vectormill.models.specs import list_own_options
    from vectormill.sources.reader import SourcePlace
    from vectormill.sources.vectors import ImportColumns

    columns = ImportColumns(key, vector, text, tuple(metadata or ()), metadata_json, content_hash)
    stated = {"model": model, **asdict(options)}
    with endpoint.connected(api_url, data_dir) as client, keys.connected(data_dir) as (engine, settings):
        # The command runs with the rights of its own user, so it may read every file that this user may read.
        unbounded = settings.model_copy(update={"source_root": ANYWHERE.folders})
        registry = open_registry(settings, is_in_use=partial(is_model_in_use, engine))
        place = SourcePlace(engine, unbounded, registry, collection=collection)
        opened = open_source(source, sql, url_env, url_file, columns, place)
        is_checked = not unchecked and opened.spec is None
        if is_checked and text is None:
            raise InvalidOption(
                "Name the column of the texts (--text), of which workers encode a sample; or pass --unchecked."
            )
        wanted = stated
        if opened.spec is not None:  # a new collection gets the spec of the output
            own = list_own_options(registry.card(opened.spec.model), opened.spec.task)
            wanted = {name: getattr(opened.spec, name) for name in ("model", *own)}
        is_new = create_missing(client, collection, wanted, keep_text=keep_text)
        refuse_other_database(client, engine, collection, is_new=is_new)
        num_imported = 0
        try:
            with engine.connect() as connection:
                spec = find_import_target(connection, collection, again=again).spec
            refuse_other_spec(place, spec, stated, opened)
            for imported in import_batches(
                client, engine, collection, spec, opened, is_checked=is_checked, is_new=is_new, again=again
            ):
                num_imported = imported["num_imported"]
            return imported
        except BaseException:
            if is_new and num_imported == 0:
                remove_imported(engine, collection, 0)
            raise


def remove_imported(engine: "Engine", collection: str, num_imported: int) -> bool:
    """Remove a collection that has nothing but so many imported rows. Return False if it has more, or is in use."""
    from vectormill.collections.removals import remove_collection

    try:
        remove_collection(engine, collection, num_imported=num_imported)
    except (CollectionInUse, CollectionNotFound):
        return False
    return True


def create_missing(client: Client, collection: str, stated: Mapping[str, Any], *, keep_text: bool) -> bool:
    """Create the collection if it is not there, and return whether it was created."""
    from vectormill.problems import ApiError

    try:
        client.collection(collection)
        return False
    except ApiError as error:
        if error.status != 404:
            raise
    options = {name: value for name, value in stated.items() if value is not None and name != "model"}
    client.create_collection(collection, model=stated["model"], options=options, keep_text=keep_text)
    return True


def open_source(
    source: str | None,
    query: str | None,
    url_env: str | None,
    url_file: str | None,
    columns: "ImportColumns",
    place: "SourcePlace",
) -> "VectorSource":
    """Open the one source that was named. Raise InvalidOption and SourceFailed."""
    from vectormill.cli.sources import absolute
    from vectormill.sources.vectors import open_files, open_output, open_query

    if (source is None) == (query is None):
        raise InvalidOption("Name one source: Parquet files, a folder with the output of a job, or --sql.")
    if query is not None:
        return open_query(query, url_env, url_file, columns, place)
    where = absolute(str(source))
    is_files = where.endswith((".parquet", ".pq"))
    return open_files(where, columns, place) if is_files else open_output(where, place)


def refuse_other_database(client: Client, engine: "Engine", collection: str, *, is_new: bool) -> None:
    """Raise ConfigurationError if the API has its collection of this name in another database than this one.

    If it is new, it is deleted there.
    """
    from vectormill.collections.descriptions import describe_collection

    theirs = next(each for each in client.collection(collection)["generations"] if each["state"] == "live")
    try:
        with engine.connect() as connection:
            found = describe_collection(connection, collection).live
        is_same = (found.id, found.created_at) == (theirs["id"], datetime.fromisoformat(theirs["created_at"]))
    except CollectionNotFound:
        is_same = False
    if not is_same:
        if is_new:
            client.delete_collection(collection)
        raise ConfigurationError(
            f"The API has the collection {collection!r} in another database than the one that the import would "
            "write: let VECTORMILL_API_URL (--api-url) and VECTORMILL_DATABASE_URL (--data-dir) name the same service."
        )


def refuse_other_spec(
    place: "SourcePlace", spec: "EncodingSpec", stated: Mapping[str, Any], source: "VectorSource"
) -> None:
    """Raise SpecMismatch if the collection has another spec than what was stated, or than the source has."""
    from vectormill.collections.collections import describe_differences
    from vectormill.models.registry import respecify
    from vectormill.models.specs import settle_spec

    wanted = {name: value for name, value in stated.items() if value is not None}
    theirs = source.spec or spec
    if theirs.revision != spec.revision:
        theirs = settle_spec(place.registry.card(spec.model), theirs)
    asked = respecify(place.registry, spec, **wanted) if wanted else spec
    for other in (asked.adopt(spec), theirs.adopt(spec)):
        if other.fingerprint() != spec.fingerprint():
            raise SpecMismatch(
                f"Collection {place.collection!r} has vectors of another spec: {describe_differences(spec, other)}."
            )


def import_batches(
    client: Client,
    engine: "Engine",
    collection: str,
    spec: "EncodingSpec",
    source: "VectorSource",
    *,
    is_checked: bool,
    is_new: bool,
    again: bool,
) -> Iterator[dict[str, Any]]:
    """Import batch by batch, each in a transaction, and yield what is imported so far.

    Before anything is written, a sample of the first batch is compared; at the end, a sample of the others. If that one
    differs, a collection that was created for the import is removed.
    """
    from vectormill.cli.load import look_at_load
    from vectormill.client.progress import Progress
    from vectormill.collections.imports import check_vectors, import_rows

    chance = random.SystemRandom()
    kept: Sample = []
    started, cosines = time.monotonic(), list[float]()
    counts = {"num_rows": 0, "num_imported": 0, "num_without_vector": 0}
    num_batches = 0

    def imported() -> dict[str, Any]:
        smallest, seconds = min(cosines, default=None), time.monotonic() - started
        return {"collection": collection, **counts, "smallest_cosine": smallest, "seconds": seconds}

    with Progress(look_at_load) as progress:
        for rows in source.batches:
            check_vectors(rows.items, rows.vectors, spec)
            texts = (
                [place for place, text in enumerate(rows.items.texts) if text.strip()] if is_checked else []
            )
            if is_checked and len(rows.items) and not texts and not cosines:
                raise InvalidOption(
                    "The first rows have no text to compare with their vectors: name another column (--text), read "
                    "rows with texts first, or pass --unchecked."
                )
            if texts and not cosines:
                first = chance.sample(texts, min(SAMPLE_TEXTS, len(texts)))
                cosines.append(compare(client, spec, take(rows, first)))
            elif texts:  # each batch has the same chance to be among the sample
                num_batches += 1
                place = len(kept) if len(kept) < SAMPLE_TEXTS else chance.randrange(num_batches)
                kept[place : place + 1] = take(rows, [chance.choice(texts)]) if place < SAMPLE_TEXTS else []
            with engine.begin() as connection:
                counts["num_imported"] += import_rows(
                    connection, collection, spec, rows.items, rows.vectors, again=again
                )
            counts["num_rows"] += len(rows.items)
            counts["num_without_vector"] += rows.num_without_vector
            total = max(source.num_rows or 0, counts["num_rows"])
            told = imported()
            progress({"num_loaded": counts["num_rows"], "num_rows": total, "seconds": told["seconds"]})
            yield told
    if kept:
        try:
            cosines.append(compare(client, spec, kept))
        except SpecMismatch as error:
            num_imported = counts["num_imported"]
            if num_imported == 0 or (is_new and remove_imported(engine, collection, num_imported)):
                raise
            raise SpecMismatch(
                f"{error} {num_imported:,} rows are imported already, and no import replaces them: delete the "
                "collection, or re-index it."
            ) from error
    yield imported()


def take(rows: "VectorRows", places: Sequence[int]) -> Sample:
    """Return the rows at these positions."""
    items = rows.items
    return [
        (items.keys[place], items.texts[place].decode("utf-8", "replace"), rows.vectors[place])
        for place in places
    ]


def compare(client: Client, spec: "EncodingSpec", sample: Sample) -> float:
    """Have workers encode the texts of a sample, and return the smallest cosine with their vectors.

    Raise SpecMismatch, which names the row, if it is below LEAST_COSINE.
    """
    import numpy as np

    from vectormill.cli.jobs import watch_job

    options = {name: getattr(spec, name) for name in SAMPLE_OPTIONS}
    items = [{"key": str(place), "text": text} for place, (_, text, _) in enumerate(sample)]
    job = watch_job(client, client.submit(items, model=spec.model, priority=0, **options))
    places, encoded = client.vectors(job["id"]).to_numpy()
    client.delete(job["id"])
    if not places:
        raise SpecMismatch(
            "None of the sampled texts could be encoded; pass --unchecked to import without a sample."
        )
    theirs = np.array([sample[int(place)][2] for place in places])
    norms = np.linalg.norm(theirs, axis=1) * np.linalg.norm(encoded, axis=1)
    cosines = (theirs * encoded).sum(axis=1) / norms
    worst = int(cosines.argmin())
    if not cosines[worst] >= LEAST_COSINE:
        raise SpecMismatch(
            f"The vector of the row {sample[int(places[worst])][0]!r} and what workers compute of its text agree by a "
            f"cosine of {cosines[worst]:.4f}, and {np.mean(cosines):.4f} on average, below {LEAST_COSINE}: state the "
            "model, revision, prompt and options that made the vectors."
        )
    return float(cosines[worst])
