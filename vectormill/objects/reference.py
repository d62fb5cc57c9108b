"""ItemReference: where the items of a chunk lie in an object, instead of the items themselves.

A chunk's payload is either its items or a reference to them, which begins with MARK. No text of such a job is
ever stored in Postgres or Redis: every process that needs the items reads them from the object, under the tag
that it had when the job was submitted.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from vectormill.domain.errors import InvalidItem, ObjectChanged
from vectormill.files import parquet
from vectormill.files.parquet import measure, naming
from vectormill.jobs.item import REFUSED_MARK, Items
from vectormill.objects.store import ObjectFile, StoredObject, read_range
from vectormill.rows.columns import Columns
from vectormill.rows.decoding import PARQUET, read_lines_of
from vectormill.rows.values import (
    are_sound_keys,
    encode_fitting_metadata,
    encode_texts,
    find_key_fault,
    join_pairs,
    spell_key,
)

if TYPE_CHECKING:
    import pyarrow

# No zstd frame begins so (RFC 8878, 3.1.1: 28 B5 2F FD), and all other payloads are zstd frames.
MARK: Final = b"vmref1\n"

# The most bytes of a key of a reference, whose process does not know the setting of the API that took the job.
MAX_KEY_BYTES: Final = 2048


class ItemReference(Struct, frozen=True, omit_defaults=True):
    """Consecutive rows of one object.

    In Parquet they are `num_rows` rows of a row group from row `skip` on. In a format of lines they are
    `num_rows` rows after the first `skip` of those in the bytes from `start` up to `end`, which begin and end
    with whole rows; `first_row` is the position in the object of the first row in these bytes, and `header` has
    the names of a CSV file's columns.
    """

    url: str
    tag: str
    num_bytes: int
    format: str
    columns: Columns
    num_rows: int
    skip: int = 0
    row_group: int = 0
    start: int = 0
    end: int = 0
    first_row: int = 0
    header: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the reference as a chunk's payload."""
        return MARK + msgspec.msgpack.encode(self)

    def take(self, start: int, stop: int) -> "ItemReference":
        """Return the reference to the rows from `start` up to `stop` of this one."""
        return msgspec.structs.replace(self, skip=self.skip + start, num_rows=stop - start)

    def name_items(self) -> list[str]:
        """Return the names of the items by their positions, which does not read the object."""
        place = f"{self.row_group}:" if self.format == PARQUET else ""
        first = self.skip + self.first_row
        return [f"{self.url}#{place}{first + row}" for row in range(self.num_rows)]

    def read(self) -> Items:
        """Read the items. A row without a key, or one that does not parse, is named by its place and fails alone.

        Raise ObjectChanged if the object is not what it was, and StorageUnavailable if it cannot be read now.
        """
        rows = read_rows(self, self.columns.names)
        keys, texts, metadata, pairs = self.columns.pick(rows.columns)
        encoded = encode_texts(texts)
        if pairs is not None:
            encoded = join_pairs(encoded, pairs)
        names, faults = self._choose_keys(keys)
        for place, reason in {**faults, **rows.faults}.items():
            encoded[place] = REFUSED_MARK + reason.encode("utf-8", "replace")
        described = [b""] * len(encoded)
        if metadata is not None:
            described = [encode_fitting_metadata(value)[0] if value else b"" for value in metadata]
        return Items(names, encoded, described)

    def read_keys(self, row_groups: "RowGroups | None" = None) -> list[str]:
        """Read the keys of the items as `read` does, and of a Parquet file no other column.

        The columns that were decoded are kept in `row_groups`.
        """
        if self.columns.key is None:
            return self.name_items()
        rows = read_rows(self, (self.columns.key,), row_groups)
        return self._choose_keys(rows.columns[self.columns.key])[0]

    def _choose_keys(self, values: Sequence[Any] | None) -> tuple[list[str], dict[int, str]]:
        """Return the items' names, and of those that are no keys the places and reasons."""
        if values is None:
            return self.name_items(), {}
        if set(map(type, values)) == {str} and are_sound_keys(values, MAX_KEY_BYTES):
            return list(values), {}
        names: list[str] = []
        faults: dict[int, str] = {}
        for place, (value, name) in enumerate(zip(values, self.name_items(), strict=True)):
            try:
                key = spell_key(value)
                reason = find_key_fault(key, MAX_KEY_BYTES)
            except ValueError as error:
                key, reason = name, str(error)
            if reason is not None:
                key, faults[place] = name, reason
            names.append(key)
        return names, faults


def is_reference(payload: bytes) -> bool:
    return payload.startswith(MARK)


def decode_reference(payload: bytes) -> ItemReference:
    """Decode a payload for which `is_reference` is true."""
    return msgspec.msgpack.decode(payload[len(MARK) :], type=ItemReference)


# -- Parquet ----------------------------------------------------------------------------------------------------------

# Row groups that are kept decoded, so that the chunks of one do not each decode it again: bytes in all, each value
# written out.
KEPT_BYTES: Final = 256 << 20
# The most bytes of the rows of a reference. Chunks are planned by what a row has as it is stored.
ROWS_BYTES: Final = 128 << 20


class RowGroups:
    """The last row groups that were read, in memory up to `most_bytes`. Thread-safe."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], pyarrow.Table] = OrderedDict()
        self._reading: dict[tuple[Any, ...], threading.Lock] = {}

    def read(self, reference: ItemReference) -> "pyarrow.Table":
        """Return the rows of a reference. Of a row group that is too large to keep, decode those before them too."""
        name = (reference.url, reference.tag, reference.row_group, reference.columns.names)
        with self._lock:
            own = self._reading.setdefault(name, threading.Lock())
        with own:
            with self._lock:
                table = self._kept.get(name)
                if table is not None:
                    self._kept.move_to_end(name)
            if table is None:
                with open_parquet(reference) as file, naming(reference.url, ObjectChanged):
                    sizes = file.measure_columns(reference.row_group)
                    num_bytes = sum(size for path, size in sizes if path in reference.columns.names)
                    most_bytes = 0 if num_bytes > self._most_bytes else self._most_bytes
                    table, is_whole = read_group(file, reference, most_bytes)
                if not is_whole:
                    return table
                self._keep(name, table)
        return table.slice(reference.skip, reference.num_rows)

    def _keep(self, name: tuple[Any, ...], table: "pyarrow.Table") -> None:
        with self._lock:
            self._kept[name] = table
            while sum(map(measure, self._kept.values())) > self._most_bytes and len(self._kept) > 1:
                gone, _ = self._kept.popitem(last=False)
                self._reading.pop(gone, None)


def read_group(file: Any, reference: ItemReference, most_bytes: int) -> "tuple[pyarrow.Table, bool]":
    """Return the row group of a reference and True, or only the reference's rows if it has more than `most_bytes`.

    It is decoded some rows at a time, since only then is it known how large equal values become, which Parquet stores
    once. The reference's rows end with the one by which they have more than ROWS_BYTES.
    """
    import pyarrow

    end, position, num_bytes, num_taken = reference.skip + reference.num_rows, 0, 0, 0
    whole, parts = [], []
    for batch in file.iter_batches(reference.columns.names, [reference.row_group]):
        first, last = max(reference.skip - position, 0), min(end - position, batch.num_rows)
        if first < last:
            parts.append(batch.slice(first, last - first))
            num_taken += measure(parts[-1])
        position += batch.num_rows
        num_bytes += measure(batch)
        if num_bytes <= most_bytes:
            whole.append(batch)
            continue
        whole.clear()
        if position >= end or num_taken > ROWS_BYTES:
            break
    is_whole = num_bytes <= most_bytes
    read = whole if is_whole else parts
    return pyarrow.Table.from_batches(read, None if read else file.schema_arrow), is_whole


ROW_GROUPS: Final = RowGroups()


def open_parquet(found: "ItemReference | StoredObject") -> Any:
    """Open an object as a pyarrow.parquet.ParquetFile. Raise ObjectChanged if it is not a Parquet file."""
    stored = StoredObject(found.url, found.num_bytes, found.tag, 0.0)
    with naming(found.url, ObjectChanged):
        return parquet.open_parquet(ObjectFile(stored))


class RowValues(NamedTuple):
    """The values of rows by column, and by place the reasons why rows do not parse."""

    columns: Mapping[str, Sequence[Any]]
    faults: Mapping[int, str]


def read_rows(
    reference: ItemReference, names: tuple[str, ...], row_groups: RowGroups | None = None
) -> RowValues:
    """Return the values of these columns of a reference's rows. Raise ObjectChanged if the rows are other ones."""
    if reference.format == PARQUET:
        only = msgspec.structs.replace(reference, columns=Columns(names[0], metadata=names))
        from vectormill.rows.arrow import list_columns  # imported here, since it takes a tenth of a second

        values: dict[str, list[Any]] = {name: [] for name in names}
        num_listed, faults = 0, {}
        for batch in (row_groups or ROW_GROUPS).read(only).to_batches():
            for name, read in list_columns(batch, names).items():
                values[name] += read
            num_listed += measure(batch)
            if num_listed > ROWS_BYTES:
                unread = range(len(values[name]), reference.num_rows)
                faults = dict.fromkeys(unread, f"the rows before it have more than {ROWS_BYTES:,} bytes")
                values = {name: read + [None] * len(unread) for name, read in values.items()}
                break
        rows = RowValues(values, faults)
    else:
        content = read_range(reference.url, reference.tag, reference.start, reference.end)
        rows = read_lines(content, reference, names)
    if any(len(values) != reference.num_rows for values in rows.columns.values()):
        raise ObjectChanged(f"{reference.url} has other rows than when the job was submitted.")
    return rows


def read_lines(content: bytes, reference: ItemReference, names: tuple[str, ...]) -> RowValues:
    """Return the values of these columns of a reference's rows, which are in the lines of `content`."""
    chosen = Columns(names[0], metadata=names)
    options = {"header": reference.header} if reference.header else {}
    place = f"{reference.url} from byte {reference.start:,} on"
    read_part = partial(read_lines_of(reference.format), keeps_faults=True, is_part=True)
    batches = read_part([content], chosen, place, **options)
    values: dict[str, list[Any]] = {name: [] for name in names}
    faults: dict[int, str] = {}
    try:
        for batch in batches:
            faults |= {len(values[names[0]]) + place: fault for place, fault in batch.faults.items()}
            for name in names:
                values[name] += batch.columns[name]
    except InvalidItem as error:
        raise ObjectChanged(f"{error} It was another row when the job was submitted.") from error
    first, end = reference.skip, reference.skip + reference.num_rows
    return RowValues(
        {name: column[first:end] for name, column in values.items()},
        {place - first: fault for place, fault in faults.items() if first <= place < end},
    )
