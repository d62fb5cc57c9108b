"""The output of a job in object storage: its manifest, which names the parts that count, and its rows.

It is read without Vectormill's API or Postgres.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import NotFound, ObjectChanged
from vectormill.extras import require
from vectormill.files.roots import ANYWHERE, Roots
from vectormill.objects.reference import open_parquet
from vectormill.objects.store import describe_object, normalize, read_range

if TYPE_CHECKING:
    import pyarrow

MANIFEST: Final = "_manifest.json"
MANIFEST_VERSION: Final = 1
# The extra with all that reading an output needs.
READING: Final = "dataframes"


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A part, or a staged one. `name` is relative to the output's folder, and sorts by `first_item`."""

    name: str
    first_item: int
    num_rows: int
    num_bytes: int


class Manifest(Struct, frozen=True, kw_only=True):
    """The content of `_manifest.json`: the job, the spec that made its results, and the parts that count."""

    version: int = MANIFEST_VERSION
    job_id: str
    state: str
    spec: dict[str, Any]
    num_items: int
    num_rows: int
    num_failed: int
    metadata: dict[str, Any]
    finished_at: str
    parts: list[OutputPart]


def read_manifest(url: str) -> Manifest:
    """Return the manifest of a job's output.

    `url` is the folder that the job was given. Raise NotFound while there is no manifest, because the job has not
    ended or never wrote there, and StorageUnavailable.
    """
    return read_manifest_below(url, ANYWHERE)


def read_manifest_below(url: str, roots: Roots) -> Manifest:
    """Return the manifest of a job's output, whose folder, if it is local, lies beneath the roots."""
    require("obstore", extra=READING)
    folder = normalize(url)
    try:
        found = describe_object(f"{folder}/{MANIFEST}", roots)
    except ObjectChanged as error:
        raise NotFound(f"{folder} has no {MANIFEST}: it is written when the job has ended.") from error
    content = read_range(found.url, found.tag, 0, found.num_bytes)
    return msgspec.json.decode(content, type=Manifest)


def make_part_schema(spec: EncodingSpec) -> "pyarrow.Schema":
    """Return the columns of a job's parts, which are the same whether or not the items of a part have metadata."""
    import pyarrow as pa

    from vectormill.results.table import choose_kind  # imported late: a client without tables loads no numpy

    return pa.schema(
        [
            pa.field("key", pa.string(), nullable=False),
            pa.field("content_hash", pa.binary(16), nullable=False),
            *choose_kind(spec).arrow_fields(spec),
            pa.field("metadata", pa.string()),
        ]
    )


# The most rows of a batch: as many as a row group of a merged part has.
BATCH_ROWS: Final = 1 << 16


def read_batches(
    url: str, columns: Sequence[str] | None = None, max_rows: int = BATCH_ROWS
) -> "Iterator[pyarrow.RecordBatch]":
    """Yield the rows of a job's output in the order of its items, at most `max_rows` at a time.

    Only parts that count are read, whatever else lies in the folder. Raise NotFound, ObjectChanged and
    StorageUnavailable.
    """
    require("pyarrow", extra=READING)
    yield from read_parts(url, read_manifest(url), columns, max_rows)


def read_parts(
    url: str, manifest: Manifest, columns: Sequence[str] | None = None, max_rows: int = BATCH_ROWS
) -> "Iterator[pyarrow.RecordBatch]":
    """Yield the rows of the parts that a manifest names. Raise ObjectChanged and StorageUnavailable."""
    import pyarrow

    folder, schema = normalize(url), make_part_schema(EncodingSpec.from_json(manifest.spec))
    for part in manifest.parts:
        with open_parquet(describe_object(f"{folder}/{part.name}", ANYWHERE)) as file:
            for read in file.iter_batches(columns):
                # The parts of a table have its types.
                batch = read.cast(pyarrow.schema([schema.field(name) for name in read.schema.names]))
                yield from (batch.slice(first, max_rows) for first in range(0, batch.num_rows, max_rows))


def read_schema(url: str, manifest: Manifest) -> "pyarrow.Schema":
    """Return the columns of an output. Raise NotFound if it has no rows."""
    if not manifest.parts:
        raise NotFound(f"{url} has no rows: every item of its job failed.")
    return make_part_schema(EncodingSpec.from_json(manifest.spec))


def read_table(url: str, columns: Sequence[str] | None = None) -> "pyarrow.Table":
    """Return the output of a job as one Arrow table in memory.

    Its columns are key, content_hash, the result (embedding; or score, label, probabilities; or output) and
    metadata. For more than fits in memory take `read_batches`. Raise the errors of read_batches.
    """
    batches = list(read_batches(url, columns))
    if not batches:
        raise NotFound(f"{url} has no rows: every item of its job failed.")
    import pyarrow

    return pyarrow.Table.from_batches(batches)
