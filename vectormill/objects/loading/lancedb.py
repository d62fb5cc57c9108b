"""LanceTarget: a table of LanceDB as the target of a load. It has the columns of the output, as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vectormill.domain.errors import StorageUnavailable
from vectormill.objects.loading.load import refuse_other_columns

if TYPE_CHECKING:
    import pyarrow

# Each batch becomes a version of the table, and is compared with the keys of all rows: few large ones are best.
VERSION_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class LanceTarget:
    """An open table."""

    table: Any
    uri: str
    batch_bytes: int = VERSION_BYTES

    def upsert(self, rows: "pyarrow.RecordBatch") -> None:
        with _translating(self.uri):
            merge = self.table.merge_insert("key").when_matched_update_all().when_not_matched_insert_all()
            merge.execute(rows)


@contextmanager
def open_lancedb(uri: str, name: str, schema: "pyarrow.Schema") -> Iterator[LanceTarget]:
    """Open the table of a database, a folder or a URL, and create it with these columns if it is not there.

    Raise SpecMismatch if it has other columns, and StorageUnavailable if the database cannot be read or written.
    """
    import lancedb

    with _translating(uri):
        database = lancedb.connect(uri)
        try:
            table = database.open_table(name)
        except ValueError:  # it does not exist
            table = database.create_table(name, schema=schema)
    there, wanted = ({field.name: field.type for field in each} for each in (table.schema, schema))
    refuse_other_columns(f"{name} of {uri}", there, wanted)
    yield LanceTarget(table, uri)


@contextmanager
def _translating(uri: str) -> Iterator[None]:
    """Raise StorageUnavailable for the errors of LanceDB, which has no tree of its own."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise StorageUnavailable(f"LanceDB at {uri} cannot be used: {error}") from error
