"""Read vectors that exist, with their keys and texts: from Parquet, from a query, or from the output of a job.

A batch is in memory at a time. What a row must have is checked here; whether its vector belongs into a collection is
not (vectormill/collections/imports.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidItem, InvalidOption, SourceFailed
from vectormill.domain.task import VECTOR
from vectormill.domain.vector_type import FLOAT_TYPES
from vectormill.files.parquet import naming, open_parquet
from vectormill.jobs.item import Items
from vectormill.objects.manifest import read_manifest, read_parts
from vectormill.rows.columns import Columns
from vectormill.rows.values import encode_fitting_metadata
from vectormill.sources.files import find_files, open_bytes
from vectormill.sources.reader import Complaints, SourceAssembler, SourcePlace
from vectormill.sources.source import SqlOptions
from vectormill.sources.sql import SqlReader

# With 4,096 dimensions as texts of a query this is some 100 MiB.
BATCH_ROWS: Final = 1024
# The columns of the output of a job, but for its key.
OUTPUT_VECTOR, OUTPUT_HASH, OUTPUT_METADATA = "embedding", "content_hash", "metadata"

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class VectorRows:
    """Rows of a source: items, whose texts are empty if the source has none, and a vector [n, dimensions] for each.

    `num_without_vector` rows of the batch had none and are left out.
    """

    items: Items
    vectors: Vectors
    num_without_vector: int = 0


@dataclass(frozen=True, slots=True)
class ImportColumns:
    """The names of a source's columns. `content_hash` has what Vectormill stores beside a vector of a text."""

    key: str = "key"
    vector: str = OUTPUT_VECTOR
    text: str | None = None
    metadata: tuple[str, ...] = ()
    metadata_json: str | None = None
    content_hash: str | None = None

    @property
    def names(self) -> list[str]:
        """Return the columns to read, each once."""
        optional = (self.text, self.metadata_json, self.content_hash)
        return list(dict.fromkeys([self.key, self.vector, *self.metadata, *filter(None, optional)]))


@dataclass(frozen=True, slots=True)
class VectorSource:
    """Where vectors are read: their number, if it is known or estimated, and batches. `spec` is known of an output."""

    num_rows: int | None
    batches: Iterable[VectorRows]
    spec: EncodingSpec | None = None


def open_query(
    query: str, url_env: str | None, url_file: str | None, columns: ImportColumns, place: SourcePlace
) -> VectorSource:
    """Return the rows of a query. Raise SourceFailed without secrets, while it is read too."""
    others = tuple(name for name in columns.names if name != columns.key)
    options = SqlOptions(
        query=query, key=columns.key, text=columns.key, metadata=others, url_env=url_env, url_file=url_file
    )
    options.check()
    reader = SqlReader(options, place)
    assembler = SourceAssembler("The query", place.settings.max_key_bytes, Complaints())

    def read() -> Iterator[VectorRows]:
        for table in reader.read_columns(BATCH_ROWS):
            vectors, present = join_values(table[columns.vector])
            yield make_rows(table, vectors, present, columns, assembler)

    return VectorSource(reader.count_rows(), read())


def open_files(pattern: str, columns: ImportColumns, place: SourcePlace) -> VectorSource:
    """Return the rows of Parquet files, by path, pattern or URL. Raise SourceFailed, while they are read too."""
    found = list(find_files((pattern,), place))
    assembler = SourceAssembler(pattern, place.settings.max_key_bytes, Complaints())

    @contextmanager
    def opened(store: Any, path: str) -> Iterator[Any]:
        with naming(path, SourceFailed), open_bytes(store, path, place) as file, open_parquet(file) as table:
            yield table

    def read() -> Iterator[VectorRows]:
        for store, path in found:
            with opened(store, path) as table:
                try:
                    wanted = Columns(columns.vector, columns.key, metadata=tuple(columns.names))
                    wanted.find(table.schema_arrow.names, path)
                except InvalidItem as error:
                    raise SourceFailed(str(error)) from error
                for batch in table.iter_batches(columns.names):
                    yield read_batch(batch, columns, assembler)

    num_rows = 0
    for store, path in found:
        with opened(store, path) as table:
            num_rows += table.num_rows
    return VectorSource(num_rows, read())


def open_output(url: str, place: SourcePlace) -> VectorSource:
    """Return the rows of the output of a job. Raise InvalidOption, NotFound, ObjectChanged and StorageUnavailable."""
    manifest = read_manifest(url)
    spec = EncodingSpec.from_json(manifest.spec)
    if spec.result != VECTOR or not spec.delivered_type.is_float:
        raise InvalidOption(
            f"{url} has no vectors of {' or '.join(FLOAT_TYPES)}, which alone can be imported."
        )
    columns = ImportColumns(content_hash=OUTPUT_HASH, metadata_json=OUTPUT_METADATA)
    assembler = SourceAssembler(url, place.settings.max_key_bytes, Complaints())
    batches = (
        read_batch(batch, columns, assembler)
        for batch in read_parts(url, manifest, columns.names, max_rows=BATCH_ROWS)
    )
    return VectorSource(manifest.num_rows, batches, spec)


def read_batch(batch: Any, columns: ImportColumns, assembler: SourceAssembler) -> VectorRows:
    """Return the rows of a record batch of Arrow."""
    from vectormill.rows.arrow import list_columns

    table = list_columns(batch, [name for name in columns.names if name != columns.vector])
    column = batch.column(columns.vector)
    present = np.asarray(column.is_valid())
    lists = column.drop_null()
    if not hasattr(lists, "flatten"):
        raise SourceFailed(f"The column {columns.vector!r} has {column.type}, not lists of numbers.")
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    lengths = set(lists.value_lengths().to_pylist())
    return make_rows(table, shape_vectors(flat, len(lists), lengths), present, columns, assembler)


def join_values(values: Sequence[Any]) -> tuple[Vectors, npt.NDArray[np.bool_]]:
    """Return the vectors of a query's column and which rows have one.

    A value is the binary form of a vector or halfvec, a list, or text like "[1,2]".
    """
    present = np.array([value is not None for value in values], dtype=np.bool_)
    rows = [value for value in values if value is not None]
    try:
        parsed = list(map(read_value, rows))
    except (TypeError, ValueError) as error:
        raise SourceFailed(
            f"The column of vectors has a value that is no list of numbers: {error}."
        ) from None
    flat = np.concatenate(parsed) if parsed else np.empty(0, dtype=np.float32)
    return shape_vectors(flat, len(rows), set(map(len, parsed))), present


def read_value(value: Any) -> Vectors:
    """Return one vector. Raise TypeError or ValueError if the value is none."""
    if isinstance(value, str):
        return np.array(value.strip("[]{} ").split(","), dtype=np.float32)
    if not isinstance(value, bytes):
        numbers = np.asarray(value, dtype=np.float32)
        if numbers.ndim != 1:
            raise ValueError("it is nested, or a single number")
        return numbers
    # The header of four bytes begins with the dimensions (vectormill/vectors/vector_types.py).
    dimensions, num_bytes = int.from_bytes(value[:2]), len(value) - 4
    if not dimensions or num_bytes not in (2 * dimensions, 4 * dimensions):
        raise ValueError("its type is neither vector nor halfvec nor an array")
    wire = ">f2" if num_bytes == 2 * dimensions else ">f4"
    return np.frombuffer(value, dtype=wire, offset=4).astype(np.float32)


def shape_vectors(flat: npt.NDArray[Any], num_rows: int, lengths: set[int]) -> Vectors:
    """Return so many rows of one length as a matrix. Raise SourceFailed if their lengths differ."""
    if len(lengths) > 1:
        raise SourceFailed(f"The vectors have different lengths: {', '.join(map(str, sorted(lengths)))}.")
    return flat.astype(np.float32, copy=False).reshape(num_rows, *(lengths or {0}))


def make_rows(
    table: Mapping[str, Sequence[Any]],
    vectors: Vectors,
    present: npt.NDArray[np.bool_],
    columns: ImportColumns,
    assembler: SourceAssembler,
) -> VectorRows:
    """Return rows of their columns. `vectors` has those of the rows that are `present`.

    Raise SourceFailed for a key that is missing or occurs twice in the batch, and InvalidOption for a key, metadata or
    a hash that cannot be stored: what a row lacks, no later import adds.
    """
    places = np.flatnonzero(present).tolist()
    taken = {
        name: [values[place] for place in places] for name, values in table.items() if name != columns.vector
    }
    named = Columns(columns.text or columns.key, columns.key, None, columns.metadata, columns.metadata_json)
    keys, texts, metadata, _ = named.pick(taken)
    assert keys is not None
    items = assembler.assemble(keys, texts if columns.text else [""] * len(keys), metadata)
    if len(items) != len(keys):
        raise InvalidOption(
            "A row has a key that no collection can have (empty, too long, or with NUL): leave it out."
        )
    for key, described in zip(items.keys, metadata or (), strict=False):
        reason = encode_fitting_metadata(described)[1] if assembler.complaints.num_without_metadata else None
        if described and reason:
            raise InvalidOption(f"The metadata of the row {key!r} {reason}: mend it, or leave the row out.")
    given = taken[columns.content_hash] if columns.content_hash else [None] * len(keys)
    if any(
        known is not None and (not isinstance(known, bytes) or len(known) not in (0, 16)) for known in given
    ):
        raise InvalidOption(
            f"The column {columns.content_hash!r} has no hashes of texts that Vectormill exported (16 bytes each)."
        )
    hashes = [
        bytes(known) if known is not None else own if text else b""
        for known, own, text in zip(given, items.content_hashes(), items.texts, strict=True)
    ]
    return VectorRows(replace(items, hashes=hashes), vectors, len(present) - len(places))
