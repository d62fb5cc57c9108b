"""Item: one text with the client's key; and the reasons for which a single item fails."""

import hashlib
from dataclasses import dataclass
from typing import Final

EMPTY_TEXT: Final = "empty_text"
NUL_CHARACTER: Final = "nul_character"
LONE_SURROGATE: Final = "lone_surrogate"
TEXT_TOO_LONG: Final = "text_too_long"
TOO_MANY_TOKENS: Final = "too_many_tokens"
ENCODING_FAILED: Final = "encoding_failed"
NON_FINITE_VECTOR: Final = "non_finite_vector"
OUT_OF_MEMORY: Final = "out_of_memory"
CRASHED_WORKER: Final = "crashed_worker"
NOT_STORED: Final = "not_stored"

ITEM_ERROR_CODES: Final = {
    EMPTY_TEXT: "the text is empty or only white space",
    NUL_CHARACTER: "the text contains a NUL character (U+0000), which Postgres cannot store",
    LONE_SURROGATE: "the text is not valid Unicode: not UTF-8, or with half of a UTF-16 surrogate pair in it",
    TEXT_TOO_LONG: "the text is longer than the hard limit of characters",
    TOO_MANY_TOKENS: "the text has more tokens than the job allows",
    ENCODING_FAILED: "the model raised an error on this text alone",
    NON_FINITE_VECTOR: "the model answered NaN or infinity, or a value too large for the collection's vector type",
    OUT_OF_MEMORY: "the device has too little memory to encode this text, even alone",
    CRASHED_WORKER: "encoding this text alone ended the worker's model process",
    NOT_STORED: "the database refused the text's chunk for a reason that does not pass",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One text with the client's key.

    `text` is UTF-8 in which lone surrogates are kept (`surrogatepass`), so that a broken text travels to the place
    that reports it. `metadata` is a JSON object as text, or empty for none.
    """

    key: str
    text: bytes
    metadata: bytes = b""

    def content_hash(self) -> bytes:
        """16 bytes that change with the text."""
        return hashlib.blake2b(self.text, digest_size=16).digest()

    def metadata_hash(self) -> bytes | None:
        """16 bytes that change with the metadata as it is written; None without any."""
        return hashlib.blake2b(self.metadata, digest_size=16).digest() if self.metadata else None


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """Why one item has no vector. `code` is a key of ITEM_ERROR_CODES."""

    code: str
    detail: str


def find_text_failure(text: bytes, max_chars: int) -> ItemFailure | None:
    """The reason for which a text can't be encoded, decided from the text alone; None when it can."""
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        return ItemFailure(LONE_SURROGATE, f"{ITEM_ERROR_CODES[LONE_SURROGATE]} (at byte {error.start})")
    if len(decoded) > max_chars:
        return ItemFailure(TEXT_TOO_LONG, f"the text has {len(decoded)} characters, {max_chars} are allowed")
    if "\0" in decoded:
        position = decoded.index("\0")
        return ItemFailure(NUL_CHARACTER, f"{ITEM_ERROR_CODES[NUL_CHARACTER]} (at character {position})")
    if not decoded.strip():
        return ItemFailure(EMPTY_TEXT, ITEM_ERROR_CODES[EMPTY_TEXT])
    return None
