"""ResultKind: all that depends on the kind of a result: columns in Postgres, JSON, Arrow, loads and comparisons.

Results of n items are an array: numbers [n, width] for vectors and scores, or objects [n], each None or bytes: the JSON
of records, or the packed form of representations.

A client that reads the output of a job has pyarrow, but neither psycopg nor zstandard, and a worker has no use for
pyarrow: methods import what not every process has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt

from vectormill.db.parameters import JSONB_VERSION, Field, FindOid, WireArray, make_bytes_array, make_row
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import ItemFailure
from vectormill.vectors.quantization import Ranges

Results = npt.NDArray[Any]
# The parts of an NDJSON line, in order.
Parts = list[bytes | memoryview]

# A 16-bit model reproduces a vector to a cosine above 0.999 in any batch and on any device.
LEAST_AGREEMENT: Final = 0.99


@dataclass(frozen=True, slots=True)
class Column:
    """A column of results in a generation's table. `element` is its SQL type without the `modifier`, its length.

    A column may be an array of that type. An array of arrays cannot be sent, so each value is then wrapped in a row of
    the type `wrapper`, whose only field unnest returns. `constraint` ends its definition. A column that not `is_shown`
    is left out of the view.
    """

    name: str
    element: str
    modifier: int | None = None
    is_nullable: bool = False
    wrapper: str = ""
    constraint: str = ""
    is_shown: bool = True

    @property
    def type(self) -> str:
        """Return the whole SQL type, as format_type writes it."""
        modifier = "" if self.modifier is None else f"({self.modifier:d})"
        return f"{self.element}{modifier}{'[]' if self.wrapper else ''}"

    @property
    def definition(self) -> str:
        return f"{self.name} {self.type}{'' if self.is_nullable else ' NOT NULL'}{self.constraint}"

    @property
    def sent(self) -> str:
        """Return the SQL of the parameter that has the values of many rows, an array named as the column."""
        kind = self.wrapper or f'"{self.element}"'  # without quotes, bit would be bit(1)
        return f"%({self.name})s::{kind}[]"


@dataclass(frozen=True, slots=True)
class LoadedColumn:
    """A column of a table of another Postgres: its name, its SQL type, and its fields for a batch of an output."""

    name: str
    type: str
    encode: Callable[[Any], Sequence[Field]]


class ResultKind(ABC):
    """One kind of result. It runs no SQL itself.

    `result` is its name, such as VECTOR of vectormill/domain/task.py. `needs_pgvector` says that its columns have such
    types, and `fault` what is wrong with broken ones.
    """

    result: ClassVar[str]
    needs_pgvector: ClassVar[bool] = True
    fault: ClassVar[str] = ""

    # In a collection.

    @abstractmethod
    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        """Return the columns of results. A new view is required if the type of the first changes, or of any output."""

    def shown(self, spec: EncodingSpec) -> Sequence[str]:
        """Return the view's columns of results as SQL expressions on the table alias `live`."""
        return [f"live.{column.name}" for column in self.columns(spec) if column.is_shown]

    @abstractmethod
    def sent(self, spec: EncodingSpec, table: str) -> str:
        """Return the SQL expression that sends the result of one row of `table`, for `read` to parse."""

    @abstractmethod
    def gathered(self, sent: str) -> str:
        """Return the SQL aggregate over the expression `sent` that sends the results of many rows as one value."""

    @abstractmethod
    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        """Parse the value of the SQL of `gathered` for many rows, or of `sent` for one row, into results."""

    @abstractmethod
    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        """Return placeholder results for items without a result."""

    @abstractmethod
    def row_bytes(self, spec: EncodingSpec) -> int | None:
        """Return the bytes of one row's result on the wire, at most; None if the size varies without a bound."""

    def make_arrays(self, results: Results, spec: EncodingSpec, find_oid: FindOid) -> Mapping[str, WireArray]:
        """Encode results as one Postgres array per column, by column name. `find_oid` returns a type's OID."""
        fields = self.make_fields(results, spec, find_oid)
        arrays = {}
        for column in self.columns(spec):
            values = fields[column.name]
            if column.wrapper:
                oid = find_oid(f"{column.element}[]")
                values = [None if value is None else make_row([(oid, value)]) for value in values]
            arrays[column.name] = make_bytes_array(
                find_oid(column.wrapper or column.element),
                [value or b"" for value in values],
                empty_is_null=True,
            )
        return arrays

    @abstractmethod
    def make_fields(
        self, results: Results, spec: EncodingSpec, find_oid: FindOid
    ) -> Mapping[str, Sequence[Field]]:
        """Encode results as the fields of a binary COPY, by column name."""

    def keep(
        self, found: Mapping[int, bytes], spec: EncodingSpec
    ) -> tuple[Mapping[int, bytes], Mapping[int, ItemFailure]]:
        """Return the objects in the form that a collection keeps, by item, and failures for those that it cannot keep.

        One object that Postgres refuses would make it refuse the whole chunk.
        """
        return found, {}

    def keep_again(self, results: Results) -> Results:
        """Return a job's results, as `read_results` returns them, in the form that a collection keeps."""
        return results

    def deliver(self, results: Results) -> Results:
        """Return a collection's results in the form that a job returns."""
        return results

    # To a client, and to other stores.

    @abstractmethod
    def measure(self, results: Results) -> int:
        """Return the approximate size of a row's results as JSON, in bytes."""

    @abstractmethod
    def write(self, results: Results, spec: EncodingSpec) -> list[Parts]:
        """Return the JSON of each row's results as parts of an object: a comma, a name and a value for each field."""

    @abstractmethod
    def arrow_fields(self, spec: EncodingSpec) -> list[Any]:
        """Return the columns of Arrow and Parquet."""

    @abstractmethod
    def arrow_arrays(self, results: Results, spec: EncodingSpec) -> list[Any]:
        """Return an Arrow array for each of `arrow_fields`."""

    @abstractmethod
    def loaded(self, spec: EncodingSpec) -> list[LoadedColumn]:
        """Return the columns of a table of another Postgres that is loaded with an output."""

    # In checks.

    @abstractmethod
    def scan(self, spec: EncodingSpec) -> tuple[str, dict[str, Any]]:
        """Return the SQL that counts the rows of some blocks of a {table} and finds broken ones, and its values."""

    @abstractmethod
    def compare(
        self, kept: Results, now: Results, spec: EncodingSpec, ranges: Ranges | None, tolerance: float
    ) -> dict[str, npt.NDArray[np.floating[Any]]]:
        """Return by name how well each stored result agrees with one that was encoded again: 1 if they are equal.

        New vectors are float32. Numbers in records may differ by `tolerance`.
        """

    @abstractmethod
    def least_agreement(self, spec: EncodingSpec) -> float:
        """Return the least good agreement of results that were encoded on another device or in another batch."""


def take_objects(values: Sequence[bytes | None]) -> Results:
    """Return the values as an object array [n]; np.array would make a fixed-width bytes array."""
    taken = np.empty(len(values), dtype=np.object_)
    taken[:] = values
    return taken


class Objects(ResultKind):
    """Shared code of kinds whose results are objects [n], of sizes without a bound."""

    def gathered(self, sent: str) -> str:
        return f"array_agg({sent})"

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        return take_objects([None] * num_rows)

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        return None

    def measure(self, results: Results) -> int:
        return max(1, sum(map(len, results)) // max(1, len(results)))


def encode_text(rows: Any, name: str) -> list[Field]:
    """Return a column of texts of an output as fields."""
    return [None if value is None else value.encode() for value in rows.column(name).to_pylist()]


def encode_jsonb(rows: Any, name: str) -> list[Field]:
    """Return a column of JSON of an output as fields."""
    return [None if value is None else JSONB_VERSION + value for value in encode_text(rows, name)]


COMPRESSION_LEVEL: Final = 3  # JSON is repetitive; a higher level takes longer than the commit
MAX_BYTES: Final = 1 << 30  # Postgres stores no larger value
_OBJECTS: Final = msgspec.msgpack.Decoder(list[bytes | None])


def pack_objects(objects: Sequence[bytes | None]) -> bytes:
    """Return the objects of a chunk without a collection as one value."""
    import zstandard

    packed = msgspec.msgpack.encode(list(objects))
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(packed)


def read_objects(content: bytes | None, num_items: int) -> list[bytes | None]:
    """Return the objects of a chunk by item; all None while the chunk has no value yet."""
    import zstandard

    if not content:
        return [None] * num_items
    return _OBJECTS.decode(zstandard.ZstdDecompressor().decompress(content, max_output_size=MAX_BYTES))
