"""Read the output of a job batch by batch and upsert each into a target. Knows none of the stores behind targets.

One batch is in memory at a time. Whatever was loaded before is replaced row by row, so that a load which was
interrupted is simply repeated.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import SpecMismatch
from vectormill.objects.manifest import BATCH_ROWS, read_manifest, read_parts, read_schema

if TYPE_CHECKING:
    import pyarrow

# The estimated bytes of a row besides its vector: key, hash, metadata and what the target store makes of them.
OTHER_BYTES: Final = 512


class LoadTarget(Protocol):
    """A table or collection of another store that is open for a load."""

    @property
    def batch_bytes(self) -> int:
        """Return the size of the batches that suit the store best."""
        ...

    def upsert(self, rows: "pyarrow.RecordBatch") -> None:
        """Insert rows with distinct keys, and replace those whose keys are there already."""
        ...


# Opens the target for outputs of a spec and with these columns, and closes it at the end of the block.
OpenTarget = Callable[[EncodingSpec, "pyarrow.Schema"], AbstractContextManager[LoadTarget]]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How many rows of an output have been loaded, and in how many seconds."""

    num_loaded: int
    num_rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load that has ended: `num_rows` rows of a job, of whose items `num_failed` have no row."""

    job_id: str
    num_rows: int
    num_failed: int
    seconds: float


def load_output(
    url: str, open_target: OpenTarget, show: Callable[[LoadProgress], object] = lambda progress: None
) -> LoadResult:
    """Load all rows of the output at `url` into a target, and call `show` before the first batch and after each.

    Raise NotFound if the folder has no manifest or no rows, ObjectChanged and StorageUnavailable if it cannot be
    read, and the errors of the target.
    """
    manifest = read_manifest(url)
    schema = read_schema(url, manifest)
    started, num_loaded = time.monotonic(), 0
    show(LoadProgress(0, manifest.num_rows, 0.0))
    with open_target(EncodingSpec.from_json(manifest.spec), schema) as target:
        max_rows = count_rows(schema, target.batch_bytes)
        for rows in read_parts(url, manifest, max_rows=max_rows):
            target.upsert(keep_last(rows))
            num_loaded += rows.num_rows
            show(LoadProgress(num_loaded, manifest.num_rows, time.monotonic() - started))
    return LoadResult(manifest.job_id, num_loaded, manifest.num_failed, time.monotonic() - started)


def count_rows(schema: "pyarrow.Schema", batch_bytes: int) -> int:
    """Return the number of rows that a batch of about so many bytes has, at least 1."""
    vector_bytes = 0
    if "embedding" in schema.names:
        kind = schema.field("embedding").type
        vector_bytes = kind.list_size * kind.value_type.bit_width // 8
    return max(1, min(BATCH_ROWS, batch_bytes // (vector_bytes + OTHER_BYTES)))


def keep_last(rows: "pyarrow.RecordBatch") -> "pyarrow.RecordBatch":
    """Return the last row of each key: stores refuse a key that comes twice in one upsert.

    Keys of texts by reference are not compared, so a job may have rows of equal keys.
    """
    last = {key: place for place, key in enumerate(rows.column("key").to_pylist())}
    return rows if len(last) == rows.num_rows else rows.take(sorted(last.values()))


def refuse_other_columns(table: str, there: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Raise SpecMismatch unless a table has all wanted columns, each of its type."""
    for name, kind in wanted.items():
        if there.get(name) != kind:
            raise SpecMismatch(
                f"The table {table} has {there.get(name) or 'nothing'} in the column {name}, and this output has "
                f"{kind}. Load into another one."
            )
