"""Items of rows: the columns of a batch become keys, texts and metadata, one rule for each fault of a row."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from vectormill.domain.credentials import hide_credentials
from vectormill.domain.errors import InvalidItem, VectormillError
from vectormill.jobs.item import Items
from vectormill.rows.decoding import RowBatch
from vectormill.rows.values import (
    are_sound_keys,
    encode_fitting_metadata,
    encode_texts,
    find_key_fault,
    is_missing,
    join_pairs,
    shorten,
    spell_key,
    spell_text,
)

# The number of complaints that are kept as examples.
EXAMPLES: Final = 3


@dataclass(slots=True)
class Complaints:
    """Faults of single rows that did not end the reading, counted by their consequence.

    A row whose key no collection accepts is skipped; no vector of it can exist. What of a row's metadata is not JSON
    that Postgres can hold is left out.
    """

    num_left_out: int = 0
    num_without_metadata: int = 0
    num_without_text: int = 0
    examples: list[str] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(sentence)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __bool__(self) -> bool:
        return bool(self.num_left_out or self.num_without_metadata or self.num_without_text)


class Assembler:
    """Convert the columns of batches to items.

    Whole columns are checked at once, and single rows only after a failure. `name` begins the messages about rows. A
    row without a key is refused with an error of the type `refusal`; one whose key cannot be stored is refused too, or
    if it `skips_bad_keys` left out and counted. A missing text becomes an empty one, so that only its item fails.
    """

    refusal: type[VectormillError] = InvalidItem
    skips_bad_keys = False
    noun = "row"

    def __init__(self, name: str, max_key_bytes: int, complaints: Complaints | None = None) -> None:
        self._name = hide_credentials(name)
        self._max_key_bytes = max_key_bytes
        self.complaints = Complaints() if complaints is None else complaints
        self._num_rows = 0

    def assemble_batch(self, batch: RowBatch) -> Items:
        """Return the items of a batch of a decoder; without a column of keys they are counted from 1."""
        keys, texts, metadata, pairs = batch.chosen.pick(batch.columns)
        if keys is None:
            keys = [str(number) for number in range(self._num_rows + 1, self._num_rows + 1 + len(texts))]
        return self.assemble(keys, texts, metadata, pairs, batch.numbers)

    def assemble(
        self,
        keys: Sequence[Any],
        texts: Sequence[Any],
        metadata: Sequence[Any] | None = None,
        pairs: Sequence[Any] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Items:
        """Return one item per row. `metadata` holds objects, JSON text, or None.

        `pairs` are the second texts of items that are pairs; where one is missing, the item is no pair. `numbers` are
        those of the rows for messages; by default rows are numbered from 1 across all batches.
        """
        numbers = numbers or range(self._num_rows + 1, self._num_rows + 1 + len(keys))
        names: Sequence[Any] = keys
        if set(map(type, keys)) != {str}:
            names = [self._read_key(key, number) for key, number in zip(keys, numbers, strict=True)]
        encoded = encode_texts(texts)
        if not all(encoded):
            self._count_missing(texts, names)
        if pairs is not None:
            encoded = join_pairs(encoded, pairs)
            self._count_missing(pairs, names)
        items = Items(names, encoded, self._encode_all(metadata, names))
        if not are_sound_keys(names, self._max_key_bytes):
            sound = [place for place, name in enumerate(names) if self._is_sound(name, numbers[place])]
            items = items.take(sound)
        self._num_rows += len(keys)
        return items

    def _read_key(self, key: Any, number: int) -> str:
        try:
            return spell_key(key)
        except ValueError as error:
            raise self.refusal(f"{self._name}, {self.noun} {number}: {error}.") from None

    def _is_sound(self, key: str, number: int) -> bool:
        reason = find_key_fault(key, self._max_key_bytes)
        if reason is None:
            return True
        if not self.skips_bad_keys:
            raise self.refusal(f"{self._name}, {self.noun} {number}: {reason}.")
        self.complaints.num_left_out += 1
        self.complaints.say(
            f"{self._name}: the row with the invalid key {shorten(key)} was skipped: {reason}."
        )
        return False

    def _count_missing(self, texts: Sequence[Any], names: Sequence[str]) -> None:
        for text, name in zip(texts, names, strict=True):
            if spell_text(text) is None:
                self.complaints.num_without_text += 1
                self.complaints.say(f"{self._name}: the row with key {shorten(name)} has no text.")

    def _encode_all(self, metadata: Sequence[Any] | None, names: Sequence[str]) -> Sequence[bytes]:
        if metadata is None:
            return [b""] * len(names)
        encoded = []
        for value, name in zip(metadata, names, strict=True):
            is_none = is_missing(value) or (isinstance(value, str) and not value)
            kept, reason = (b"", None) if is_none else encode_fitting_metadata(value)
            if reason is not None:
                self.complaints.num_without_metadata += 1
                self.complaints.say(
                    f"{self._name}: of the metadata of key {shorten(name)} something was left out: it {reason}."
                )
            encoded.append(kept)
        return encoded
