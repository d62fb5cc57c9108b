"""Reader: the interface of all readers of sources, and the conversion of columns to items."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import msgspec
import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from vectormill.collections.collection import LIVE
from vectormill.collections.generations import find_in_state
from vectormill.db.outages import is_outage
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import SourceFailed, SourceInterrupted
from vectormill.jobs.item import PAIR_MARK, Item, Items, has_nul, join_pair
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.sources.source import Source

# A batch has at most this many rows, or about this many bytes of text if rows are long. Each batch is held in
# memory two or three times.
MOST_ROWS: Final = 8192
MOST_BYTES: Final = 8 << 20
FIRST_ROWS: Final = 256

# The number of complaints that are kept as examples.
EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """The context in which a source is read: collection, database, task and model.

    `run_id` is the run that reads, None for a check; a push is found by it. `spec` is that of the generation
    to be written; None means that of the live generation.
    """

    engine: Engine
    settings: Settings
    registry: Registry
    _: KW_ONLY
    collection: str
    spec: EncodingSpec | None = None
    run_id: UUID | None = None

    def find_spec(self) -> EncodingSpec | None:
        """Return this context's spec, else the collection's; None if the collection does not exist."""
        if self.spec is not None:
            return self.spec
        with self.engine.connect() as connection:
            generation = find_in_state(connection, self.collection, LIVE)
        return None if generation is None else generation.spec


@dataclass(slots=True)
class Complaints:
    """Faults of single rows that did not end the reading, counted by their consequence.

    A row whose key no collection accepts is skipped; no vector of it can exist. A row whose metadata is not a
    JSON object is kept without metadata.
    """

    num_left_out: int = 0
    num_without_metadata: int = 0
    num_without_text: int = 0
    examples: list[str] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(sentence)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_left_out": self.num_left_out,
            "num_without_metadata": self.num_without_metadata,
            "num_without_text": self.num_without_text,
            "examples": list(self.examples),
        }

    def __bool__(self) -> bool:
        return bool(self.num_left_out or self.num_without_metadata or self.num_without_text)


class Reader:
    """Base class of readers, which read a source once from the beginning and fill `complaints`."""

    # True if a row that was not read no longer exists in the source.
    tells_what_vanished: bool = True
    # True if a row that was not read may exist nevertheless, so that the source must be asked before it is deleted.
    must_be_asked: bool = False
    # The source that this reader reads, with its options; None for a reader without one.
    source: Source | None = None
    # The greatest value that was read of the column that grows with each change; None if the source names none.
    newest: str | float | None = None

    def __init__(self) -> None:
        self.complaints = Complaints()

    def narrow(self, since: str | float, failed: Sequence[str] = ()) -> None:
        """Read only rows whose column of changes is at or above this value, and those with the keys that failed."""
        raise NotImplementedError  # abstract: only readers of sources that name such a column can do it

    def read(self) -> Iterator[Sequence[Item]]:
        """Yield the rows in batches of at most MOST_ROWS, in the source's order if it has one.

        Memory does not grow with the size of the source. A missing text becomes an empty one, so that only
        its item fails. Raise SourceFailed with the source's own message, without secrets, if reading fails,
        and for a row without a key or a key that occurs twice in a batch. Duplicates across batches are for
        the caller to find.
        """
        raise NotImplementedError  # abstract: the reader of each kind of source overrides it

    def count_rows(self) -> int | None:
        """Return the approximate number of rows; None if no cheap estimate is available."""
        return None

    def cancel(self) -> None:
        """Stop reading, and cancel the query if the server supports that. Called from another thread."""


class BatchSize:
    """The number of rows to fetch next, adapted to their length so that a batch stays within MOST_BYTES."""

    def __init__(self, most_rows: int = MOST_ROWS, most_bytes: int = MOST_BYTES) -> None:
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self.rows = min(FIRST_ROWS, most_rows)

    def learn(self, items: Items) -> None:
        """Update the estimate from the items of the last batch."""
        num_bytes = sum(map(len, items.texts)) + sum(map(len, items.metadata))
        self.learn_bytes(len(items), num_bytes)

    def learn_bytes(self, num_rows: int, num_bytes: int) -> None:
        """Update the estimate from a batch; grow at most fourfold, because the next texts may be longer."""
        if num_rows:
            fitting = self._most_bytes * num_rows // max(num_bytes, 1)
            self.rows = max(1, min(fitting, 4 * self.rows, self._most_rows))


# Sorted keys, decimals as numbers, and types unknown to JSON as text, so that equal values give equal bytes.
ENCODER: Final = msgspec.json.Encoder(order="sorted", decimal_format="number", enc_hook=str)
OBJECT_DECODER: Final = msgspec.json.Decoder(dict[str, Any])
MAX_METADATA_DEPTH: Final = 100
# JSON that is nested deeper than MAX_METADATA_DEPTH has more brackets than this number of bytes.
SHALLOW_BYTES: Final = 2 * MAX_METADATA_DEPTH
# A byte that occurs neither in UTF-8 nor as the separator of a pair.
NO_TEXT: Final = b"\xfe"


def encode_metadata(metadata: Any) -> bytes:
    """Encode a JSON object, given as a dict or as text, with sorted keys and no white space.

    Raise ValueError for anything else, and for an object that is nested too deeply or contains NUL.
    """
    if isinstance(metadata, str | bytes | bytearray | memoryview):
        try:
            metadata = OBJECT_DECODER.decode(metadata)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise ValueError("not a JSON object") from None
    if not isinstance(metadata, dict):
        raise ValueError("not a JSON object")
    try:
        encoded = ENCODER.encode(metadata)
    except (UnicodeEncodeError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not representable as JSON ({error})") from None
    if len(encoded) > SHALLOW_BYTES and _measure_depth(metadata) > MAX_METADATA_DEPTH:
        raise ValueError(f"nested more than {MAX_METADATA_DEPTH} levels deep")
    if _may_be_infinite(encoded):
        encoded = ENCODER.encode(_drop_infinite(metadata))
    if has_nul(encoded):
        raise ValueError("contains a NUL character (U+0000)")
    return encoded


def _may_be_infinite(encoded: bytes) -> bool:
    """Return True if encoded metadata may contain a NaN or infinite decimal, which is not valid JSON."""
    return b"NaN" in encoded or b"Infinity" in encoded


def _drop_infinite(value: Any) -> Any:
    """Replace NaN and infinite decimals by null, as the encoder does with floats."""
    if isinstance(value, Decimal):
        return value if value.is_finite() else None
    if isinstance(value, dict):
        return {name: _drop_infinite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_drop_infinite(inner) for inner in value]
    return value


def _measure_depth(value: Any) -> int:
    layer, depth = [value], 0
    while layer := [inner for inner in layer if isinstance(inner, dict | list | tuple)]:
        depth += 1
        layer = [part for inner in layer for part in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


class Assembler:
    """Convert the columns of batches to items.

    Whole columns are checked at once, and single rows only after a failure. `name` begins the messages about
    rows, which are numbered from 1 across all batches.
    """

    def __init__(self, name: str, max_key_bytes: int, complaints: Complaints) -> None:
        self._name = name
        self._max_key_bytes = max_key_bytes
        self._complaints = complaints
        self._num_rows = 0

    def assemble(
        self,
        keys: Sequence[Any],
        texts: Sequence[Any],
        metadata: Sequence[Any] | None = None,
        pairs: Sequence[Any] | None = None,
    ) -> Items:
        """Return one item per row. `metadata` holds objects, JSON text, or None.

        `pairs` are the second texts if items are pairs; a missing one becomes empty. Raise SourceFailed if a
        key is missing or occurs twice.
        """
        names: Sequence[Any] = keys
        if set(map(type, keys)) != {str}:
            names = [self._read_key(key, row) for row, key in enumerate(keys, start=self._num_rows + 1)]
        distinct = set(names)
        if len(distinct) != len(names):
            self._refuse_duplicate(names)
        encoded = self._encode_texts(texts, names)
        if pairs is not None:
            encoded = list(map(join_pair, encoded, self._encode_texts(pairs, names)))
        items = Items(names, encoded, self._encode_all(metadata, names))
        if not self._are_sound(names, distinct):
            items = items.take(place for place, name in enumerate(names) if self._is_sound(name))
        self._num_rows += len(keys)
        return items

    def _encode_texts(self, texts: Sequence[Any], names: Sequence[str]) -> list[bytes]:
        try:
            return [text.encode() for text in texts]
        except (AttributeError, UnicodeEncodeError):
            return [self._encode_text(text, name) for text, name in zip(texts, names, strict=True)]

    def _encode_all(self, metadata: Sequence[Any] | None, names: Sequence[str]) -> list[bytes]:
        if metadata is None:
            return [b""] * len(names)
        if set(map(type, metadata)) == {dict}:
            with suppress(ValueError, TypeError, RecursionError):
                encoded = list(map(ENCODER.encode, metadata))
                together = b"".join(encoded)
                if (
                    max(map(len, encoded)) <= SHALLOW_BYTES
                    and b"\\u0000" not in together
                    and not _may_be_infinite(together)
                ):
                    return encoded
        return [self._encode_metadata(value, name) for value, name in zip(metadata, names, strict=True)]

    def _are_sound(self, names: Sequence[str], distinct: set[str]) -> bool:
        """Return True if all names are valid keys."""
        together = "".join(names)
        if "" in distinct or "\0" in together or 4 * max(map(len, names), default=0) > self._max_key_bytes:
            return False
        return together.isascii() or not any("\ud800" <= character <= "\udfff" for character in set(together))

    def _is_sound(self, key: str) -> bool:
        try:
            num_bytes = len(key.encode())
        except UnicodeEncodeError:
            reason = "it is not valid Unicode"
        else:
            if key and "\0" not in key and num_bytes <= self._max_key_bytes:
                return True
            reason = (
                "it is empty"
                if not key
                else f"it has {num_bytes} bytes; at most {self._max_key_bytes} are allowed"
            )
            if "\0" in key:
                reason = "it contains a NUL character (U+0000)"
        self._complaints.num_left_out += 1
        self._complaints.say(f"{self._name}: the row with the invalid key {_cut(key)} was skipped: {reason}.")
        return False

    def _read_key(self, key: Any, row: int) -> str:
        if isinstance(key, str):
            return key
        if key is None:
            raise SourceFailed(f"{self._name}, row {row}: the key is null; every row needs a key.")
        if isinstance(key, bool | float) or not isinstance(key, int | UUID):
            if isinstance(key, bytes | bytearray | memoryview):
                return bytes(key).decode("utf-8", "surrogateescape")
            if isinstance(key, bool | float | dict | list):
                raise SourceFailed(
                    f"{self._name}, row {row}: the key must be text or a whole number; got {_cut(str(key))}, a "
                    f"{type(key).__name__}."
                )
        return str(key)

    def _refuse_duplicate(self, names: Sequence[str]) -> None:
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise SourceFailed(
                    f"{self._name}: duplicate key {_cut(name)}; each row must have a unique key."
                )
            seen.add(name)

    def _encode_text(self, text: Any, name: str) -> bytes:
        """Encode one text, keeping lone surrogates and raw bytes, so that only a broken text fails.

        The separator byte of pairs is replaced in raw bytes, by a byte that is invalid in UTF-8 too.
        """
        if text is None:
            self._complaints.num_without_text += 1
            self._complaints.say(f"{self._name}: the row with key {_cut(name)} has no text.")
            return b""
        if isinstance(text, str):
            return text.encode("utf-8", "surrogatepass")
        if isinstance(text, bytes | bytearray | memoryview):
            return bytes(text).replace(PAIR_MARK, NO_TEXT)
        return str(text).encode("utf-8", "surrogatepass")

    def _encode_metadata(self, metadata: Any, name: str) -> bytes:
        if metadata is None or metadata == "":
            return b""
        try:
            return encode_metadata(metadata)
        except ValueError as error:
            self._complaints.num_without_metadata += 1
            self._complaints.say(f"{self._name}: the metadata of key {_cut(name)} was ignored: {error}.")
            return b""


def _cut(text: str) -> str:
    """Quote a key for a message, shortened if it is long."""
    shown = text if len(text) <= 80 else text[:77] + "…"
    return repr(shown)


def describe_database_error(what: str, error: Exception) -> SourceFailed:
    """Return the error of a source that reads our own Postgres: SourceInterrupted if it is transient."""
    words = " ".join(str(getattr(error, "orig", error)).split())
    return choose_failure(error)(f"{what} cannot be read: {words.rstrip('.')}.")


def choose_failure(error: Exception) -> type[SourceFailed]:
    """Return SourceInterrupted for a transient error, else SourceFailed.

    For databases other than Postgres only a broken connection is known to be transient.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    is_known = isinstance(cause, psycopg.Error) or not isinstance(error, DBAPIError)
    passes = is_outage(error) if is_known else getattr(error, "connection_invalidated", False)
    return SourceInterrupted if passes else SourceFailed
