"""Item: one text with the client's key, or a pair of texts that are scored together, and the errors of items.

A pair is carried as one text, so that code which only passes texts on need not know about pairs. The
separator is a byte that occurs neither in UTF-8 nor in an encoded lone surrogate, so pairs and texts cannot
be confused. Code that does not expect a pair finds a text that is not valid Unicode, and reports that.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, overload

from vectormill.domain.errors import InvalidOption

EMPTY_TEXT: Final = "empty_text"
NUL_CHARACTER: Final = "nul_character"
LONE_SURROGATE: Final = "lone_surrogate"
TEXT_TOO_LONG: Final = "text_too_long"
TOO_MANY_TOKENS: Final = "too_many_tokens"
ENCODING_FAILED: Final = "encoding_failed"
NON_FINITE_VECTOR: Final = "non_finite_vector"
ZERO_VECTOR: Final = "zero_vector"
OUT_OF_MEMORY: Final = "out_of_memory"
CRASHED_WORKER: Final = "crashed_worker"
MODEL_NOT_LOADED: Final = "model_not_loaded"
NOT_STORED: Final = "not_stored"
INPUT_CHANGED: Final = "input_changed"
NO_PAIR: Final = "no_pair"
UNSTORABLE_RECORD: Final = "unstorable_record"
TOO_MANY_WEIGHTS: Final = "too_many_weights"
UNREADABLE_ROW: Final = "unreadable_row"
PASSAGE_NOT_FOUND: Final = "passage_not_found"

ITEM_ERROR_CODES: Final = {
    EMPTY_TEXT: "the text is empty or contains only whitespace",
    NUL_CHARACTER: "the text contains a NUL character (U+0000), which Postgres cannot store",
    LONE_SURROGATE: "the text is not valid Unicode: it is not UTF-8, or contains an unpaired UTF-16 surrogate",
    TEXT_TOO_LONG: "the text exceeds the hard limit on characters",
    TOO_MANY_TOKENS: "the text has more tokens than the job allows",
    ENCODING_FAILED: "the model raised an error on this text alone",
    NON_FINITE_VECTOR: "the model returned NaN or infinity, or a value too large for the collection's vector type",
    ZERO_VECTOR: "the vector is zero, or becomes zero in the collection's vector type, so it has no direction",
    OUT_OF_MEMORY: "the device has too little memory to encode this text, even alone",
    CRASHED_WORKER: "encoding this text alone ended the worker's model process",
    MODEL_NOT_LOADED: "no live worker could load the job's model within the time limit",
    NO_PAIR: "the model compares two texts, but text_pair is missing",
    PASSAGE_NOT_FOUND: "the passage does not occur in its text_pair, the text that it is to be read in",
    UNSTORABLE_RECORD: "the extracted record is not JSON that Postgres can store in a collection",
    TOO_MANY_WEIGHTS: "the sparse vector has more weights than Postgres can store in a collection",
    UNREADABLE_ROW: "the object's row has no key, or cannot be read as its format says",
    INPUT_CHANGED: "the object with the text was changed or removed after the job was submitted",
    NOT_STORED: "the database permanently rejected the text or its whole chunk",
}

# These errors come of what a model process computes, so a faulty one can cause them for a text without a fault.
MODEL_FAULTS: Final = (
    ENCODING_FAILED, NON_FINITE_VECTOR, ZERO_VECTOR, OUT_OF_MEMORY,
    CRASHED_WORKER, NOT_STORED, UNSTORABLE_RECORD, TOO_MANY_WEIGHTS,
)  # fmt: skip

# The key in a row's metadata that says which part of its document the row is.
PASSAGE: Final = "_passage"


# The number of backslashes before it must be even: "\\u0000" spells a backslash, not a NUL.
_NUL_ESCAPE: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def has_nul(encoded: bytes) -> bool:
    """Return whether JSON contains an escaped NUL character, which jsonb refuses."""
    return b"\\u0000" in encoded and _NUL_ESCAPE.search(encoded) is not None


@dataclass(frozen=True, slots=True)
class Item:
    """One text with the client's key.

    `text` is UTF-8 in which lone surrogates are kept (`surrogatepass`), so that a broken text reaches the
    code that reports it. `metadata` is a JSON object as text, or empty for none. `place` is the position in
    the order of writers of a row that is copied from one generation to another; None if the item has the
    position of its job.
    """

    key: str
    text: bytes
    metadata: bytes = b""
    place: int | None = None

    @property
    def num_bytes(self) -> int:
        """Return the size of all that is held of the item, which limits of bytes are about."""
        return len(self.key.encode()) + len(self.text) + len(self.metadata)

    def content_hash(self) -> bytes:
        """Return a 16-byte hash of the text."""
        return blake2b(self.text, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Items(Sequence[Item]):
    """Many items as columns, so that a chunk can be processed without an object for each item.

    Either every item has its own `place`, or `places` is None. `hashes` replace those of the texts where a row came
    without its text. `reference` is the payload of a chunk whose items were read from an object.
    """

    keys: Sequence[str]
    texts: Sequence[bytes]
    metadata: Sequence[bytes]
    places: Sequence[int] | None = None
    hashes: Sequence[bytes] | None = None
    reference: bytes | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, items: Sequence[Item]) -> "Items":
        """Return these items as columns; a copy unless they are columns already."""
        if isinstance(items, Items):
            return items
        places = [item.place for item in items if item.place is not None]
        return cls(
            [item.key for item in items],
            [item.text for item in items],
            [item.metadata for item in items],
            places or None,
        )

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> "Items": ...

    def __getitem__(self, place: int | slice) -> "Item | Items":
        if isinstance(place, slice):
            own = None if self.places is None else self.places[place]
            hashes = None if self.hashes is None else self.hashes[place]
            return Items(self.keys[place], self.texts[place], self.metadata[place], own, hashes)
        own_place = None if self.places is None else self.places[place]
        return Item(self.keys[place], self.texts[place], self.metadata[place], own_place)

    def __iter__(self) -> Iterator[Item]:
        if self.places is None:
            return map(Item, self.keys, self.texts, self.metadata)
        return map(Item, self.keys, self.texts, self.metadata, self.places)

    def take(self, places: Iterable[int]) -> "Items":
        """Return the items at these positions, in the given order."""
        some = list(places)
        return Items(
            [self.keys[place] for place in some],
            [self.texts[place] for place in some],
            [self.metadata[place] for place in some],
            None if self.places is None else [self.places[place] for place in some],
            None if self.hashes is None else [self.hashes[place] for place in some],
        )

    def encode_keys(self) -> list[bytes]:
        """Return the keys as UTF-8."""
        return list(map(str.encode, self.keys))

    def content_hashes(self) -> list[bytes]:
        """Return the hash of each item's text, as Item.content_hash does, or the one in its place."""
        return (
            list(self.hashes)
            if self.hashes is not None
            else [blake2b(text, digest_size=16).digest() for text in self.texts]
        )

    def metadata_hashes(self) -> list[bytes]:
        """Return a 16-byte hash of each item's metadata as it is written; empty if there is none."""
        return [blake2b(text, digest_size=16).digest() if text else b"" for text in self.metadata]


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """The reason why one item has no vector. `code` is a key of ITEM_ERROR_CODES."""

    code: str
    detail: str


def find_text_failure(text: bytes, max_chars: int) -> ItemFailure | None:
    """Return the reason why this text cannot be encoded; None if it can be.

    No model is needed for the check.
    """
    if text.startswith(REFUSED_MARK):
        return ItemFailure(UNREADABLE_ROW, text[len(REFUSED_MARK) :].decode("utf-8", "replace"))
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        return ItemFailure(LONE_SURROGATE, f"{ITEM_ERROR_CODES[LONE_SURROGATE]} (at byte {error.start})")
    if len(decoded) > max_chars:
        return ItemFailure(
            TEXT_TOO_LONG, f"the text has {len(decoded)} characters; at most {max_chars} are allowed"
        )
    if "\0" in decoded:
        position = decoded.index("\0")
        return ItemFailure(NUL_CHARACTER, f"{ITEM_ERROR_CODES[NUL_CHARACTER]} (at character {position})")
    if not decoded.strip():
        return ItemFailure(EMPTY_TEXT, ITEM_ERROR_CODES[EMPTY_TEXT])
    return None


PAIR_MARK: Final = b"\xff"
# Stands in a passage's text, U+001E, before the place of the passage if that is not its first occurrence.
PLACE_MARK: Final = "\x1e"
# Begins what stands in place of the text of a row that cannot be an item: the reason, with which the item fails.
REFUSED_MARK: Final = b"\xfe"
# The limit on the bytes of all pairs of one request, which are in memory together and each repeat the query.
# A thousand passages of 8 KiB fit with a query of 8 KiB, which is more than any model reads.
MAX_PAIRS_BYTES: Final = 16 << 20


def join_pair(text: bytes, text_pair: bytes) -> bytes:
    """Join two texts into one, which is hashed, compared and stored like any other text."""
    return text + PAIR_MARK + text_pair


def pair_with_each(query: bytes, texts: Sequence[bytes]) -> list[bytes]:
    """Pair a query with each text.

    Raise InvalidOption if the pairs would be too large, before any memory is used.
    """
    num_bytes = (len(query) + len(PAIR_MARK)) * len(texts) + sum(map(len, texts))
    if num_bytes > MAX_PAIRS_BYTES:
        raise InvalidOption(
            f"Pairing the query ({len(query):,} bytes) with {len(texts):,} documents takes {num_bytes:,} bytes, which "
            f"exceeds the limit of {MAX_PAIRS_BYTES:,} bytes per request. Shorten the query or send fewer documents."
        )
    return [join_pair(query, text) for text in texts]


def split_pair(text: bytes) -> tuple[bytes, bytes | None]:
    """Split a pair into its two texts; the second is None if the text is not a pair."""
    first, mark, second = text.partition(PAIR_MARK)
    return first, second if mark else None


def find_side_failure(text: bytes, max_chars: int) -> ItemFailure | None:
    """Return the reason why a pair or a single text cannot be encoded; None if it can be.

    Each text of a pair may have `max_chars` characters.
    """
    first, second = split_pair(text)
    failure = find_text_failure(first, max_chars)
    if failure is not None or second is None:
        return failure
    failure = find_text_failure(second, max_chars)
    return None if failure is None else name_second(failure)


def name_second(failure: ItemFailure) -> ItemFailure:
    """Return the failure with a detail that names the second text of the pair."""
    return ItemFailure(failure.code, f"text_pair: {failure.detail}")
