"""Read the output of a job from object storage by its manifest, without Vectormill's API or Postgres."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import NotFound
from vectormill.extras import require
from vectormill.files.roots import ANYWHERE
from vectormill.objects.manifest import READING, Manifest, make_part_schema, read_manifest
from vectormill.objects.reference import open_parquet
from vectormill.objects.store import describe_object, normalize

if TYPE_CHECKING:
    import pyarrow

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
