"""Iceberg: tables of a catalog that get the parts of jobs' outputs, those of each job in one snapshot.

Catalogs are those of pyiceberg's own configuration (https://py.iceberg.apache.org/configuration/) in the
processes of API and indexer. Workers know no catalogs: they write their parts into a folder below the table's data,
with the types and the field ids of the table's columns, which the submission has stored.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from uuid import UUID

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, SpecMismatch, StorageUnavailable, VectormillError
from vectormill.extras import describe_missing
from vectormill.objects.manifest import make_part_schema
from vectormill.objects.store import normalize

if TYPE_CHECKING:
    import pyarrow
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

SCHEME: Final = "iceberg://"
TABLE_URL: Final = re.compile(r"iceberg://(?P<catalog>[^/\s]+)/(?P<table>[^/.\s]+(?:\.[^/.\s]+)+)")
# The property of a snapshot that says whose parts it has added. A repetition finds them by it.
JOB_PROPERTY: Final = "vectormill.job-id"
# Components of vectors have no minimum that would help a query, so parts have statistics of keys alone.
PROPERTIES: Final = {
    "write.metadata.metrics.default": "none",
    "write.metadata.metrics.column.key": "truncate(16)",
}
NUM_READERS: Final = 16


def check_table_url(url: str) -> str:
    """Return the URL of a table. Raise InvalidOption if it does not name a catalog, a namespace and a table."""
    if TABLE_URL.fullmatch(url) is None:
        raise InvalidOption(f"{url!r} is not the URL of a table; write iceberg://catalog/namespace.table.")
    return url


def prepare_table(url: str, job_id: UUID, spec: EncodingSpec) -> tuple[str, bytes]:
    """Return the folder below a table's data for the parts of a job, and their Arrow schema in the table.

    Create the table if there is none.

    Raise InvalidOption if the catalog or the namespace is not known or Iceberg has no such vectors, SpecMismatch
    if the table does not fit, and StorageUnavailable.
    """
    if spec.delivered_type.is_half:
        raise InvalidOption(
            "Iceberg has no half-precision numbers: choose another vector type, such as float32."
        )
    schema = make_part_schema(spec)
    with _open_catalog(url) as (catalog, name), _translating(url):
        import pyarrow
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        table = _open_table(catalog, name, schema)
        if not table.spec().is_unpartitioned():
            raise SpecMismatch(f"{url} is partitioned, and the parts of a job are not. Give another table.")
        folder = table.properties.get("write.data.path", f"{table.location()}/data")
        columns = schema_to_pyarrow(table.schema())
        stored = pyarrow.schema([columns.field(column) for column in schema.names])
        return f"{normalize(folder)}/vectormill-{job_id}", stored.serialize().to_pybytes()


def _open_table(catalog: "Catalog", name: str, schema: "pyarrow.Schema") -> "Table":
    """Load or create a table, and compare its columns with a schema."""
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
    from pyiceberg.io.pyarrow import _check_pyarrow_schema_compatible as check_schema

    try:
        table = catalog.load_table(name)
    except NoSuchTableError:
        try:
            table = catalog.create_table_if_not_exists(name, schema, properties=PROPERTIES)
        except NoSuchNamespaceError as error:
            raise InvalidOption(
                f"The catalog has no namespace for {name}. Create the namespace first."
            ) from error
    # Adding a file makes the same check.
    check_schema(table.schema(), schema, format_version=table.format_version)
    return table


def add_parts(url: str, job_id: UUID, paths: Iterable[str], check: Callable[[], None]) -> int:
    """Add the parts that no snapshot of the job has added yet in one snapshot, and return their number.

    `check` is called between the files, and ends the work by raising. Raise SpecMismatch if the table does not fit
    any more, and StorageUnavailable.
    """
    with _open_catalog(url) as (catalog, name):
        from pyiceberg.io.pyarrow import parquet_file_to_data_file
        from pyiceberg.table import TableProperties

        with _translating(url):
            table = catalog.load_table(name)
            added = _find_added(table, job_id)
        new = [path for path in paths if path not in added]
        if not new:
            return 0

        def read(path: str) -> "DataFile":
            with _translating(url):
                return parquet_file_to_data_file(table.io, table.metadata, path)

        files = []
        with ThreadPoolExecutor(NUM_READERS) as pool:
            for file in pool.map(read, new):
                check()
                files.append(file)
        # If another commit came first, it may have been one of the same job, so its parts have to be looked for again.
        # By default pyiceberg would repeat this one on top of it.
        table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
        with _translating(url), table.transaction() as transaction:
            update = transaction.update_snapshot(snapshot_properties={JOB_PROPERTY: str(job_id)})
            with update.fast_append() as append:
                for file in files:
                    append.append_data_file(file)
        return len(new)


def _find_added(table: "Table", job_id: UUID) -> set[str]:
    """Return the paths of the files that snapshots of a job have added, whether or not the table still has them."""
    return {
        entry.data_file.file_path
        for snapshot in table.snapshots()
        if snapshot.summary is not None and snapshot.summary[JOB_PROPERTY] == str(job_id)
        for manifest in snapshot.manifests(table.io)
        if manifest.added_snapshot_id == snapshot.snapshot_id
        for entry in manifest.fetch_manifest_entry(table.io)
        if entry.snapshot_id == snapshot.snapshot_id
    }


@contextmanager
def _open_catalog(url: str) -> "Iterator[tuple[Catalog, str]]":
    """Open the catalog of a table, and yield it with the table's name. Raise InvalidOption and StorageUnavailable."""
    try:
        from pyiceberg.catalog import load_catalog
    except ModuleNotFoundError as error:
        raise InvalidOption(
            f"{describe_missing(error.name, 'iceberg')} API and indexer need it for {url}."
        ) from error
    match = TABLE_URL.fullmatch(url)
    assert match is not None, "checked by check_table_url"
    with _translating(url):
        try:
            catalog = load_catalog(match["catalog"])
        except ValueError as error:
            raise InvalidOption(f"The catalog of {url} is not configured here: {error}.") from error
    with catalog:
        yield catalog, match["table"]


@contextmanager
def _translating(url: str) -> Iterator[None]:
    """Raise SpecMismatch and StorageUnavailable for the errors of pyiceberg and of what it uses."""
    try:
        yield
    except VectormillError:
        raise
    except (ValueError, KeyError) as error:  # the latter for a column that has another name now
        raise SpecMismatch(f"{url} does not fit the results of this job: {error}") from error
    except Exception as error:
        raise StorageUnavailable(f"{url}: {type(error).__name__}: {error}") from error
