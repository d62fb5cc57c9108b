"""Columns: which columns, or fields, of a row become an item's key, text, second text and metadata."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from vectormill.domain.errors import InvalidItem
from vectormill.files.formats import PAIR_FIELD

# The fields that name an item where none was chosen, the first that a file has.
KEY_FIELDS: Final = ("key", "id")
METADATA_FIELD: Final = "metadata"
_SHOWN: Final = re.compile(r"[\w .()%/-]{1,64}")

Values = tuple[Sequence[Any] | None, Sequence[Any], Sequence[Any] | None, Sequence[Any] | None]


class Columns(Struct, frozen=True, omit_defaults=True):
    """The names of the columns that make an item.

    Without a `key` an item is named by its place. `metadata` names the columns that become fields of the metadata, and
    `metadata_json` one column that holds objects.
    """

    text: str = "text"
    key: str | None = None
    text_pair: str | None = None
    metadata: tuple[str, ...] = ()
    metadata_json: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of each column once."""
        wanted = (self.key, self.text, self.text_pair, *self.metadata, self.metadata_json)
        return tuple(dict.fromkeys(name for name in wanted if name is not None))

    def find(self, present: Sequence[str], place: str, advice: str = "") -> "Columns":
        """Return these columns. Raise InvalidItem, whose text begins with `place`, for a missing or double one."""
        for name in self.names:
            if name not in present:
                raise InvalidItem(
                    f"{place} has no column {name!r}; its columns are {show_names(present)}. {advice}".rstrip()
                )
            if list(present).count(name) > 1:
                raise InvalidItem(
                    f"{place} has several columns {name!r}; rename all but one, since each may be meant."
                )
        return self

    def guess(self, present: Sequence[str], place: str, advice: str = "") -> "Columns":
        """Return these columns with those of the usual names of a key, a second text and metadata that are present.

        Raise the errors of `find`.
        """
        pair = None if self.text_pair == PAIR_FIELD and PAIR_FIELD not in present else self.text_pair
        key = self.key or next((name for name in KEY_FIELDS if name in present), None)
        takes_metadata = not self.metadata and METADATA_FIELD in present
        guessed = msgspec.structs.replace(
            self,
            key=key,
            text_pair=pair,
            metadata_json=METADATA_FIELD if takes_metadata else self.metadata_json,
        )
        return guessed.find(present, place, advice)

    def pick(self, columns: Mapping[str, Sequence[Any]]) -> Values:
        """Return the keys, texts, metadata and second texts of rows; None for what is not named."""
        metadata: Sequence[Any] | None = None
        if self.metadata_json is not None:
            metadata = columns[self.metadata_json]
        elif self.metadata:
            described = zip(*(columns[name] for name in self.metadata), strict=True)
            metadata = [dict(zip(self.metadata, row, strict=True)) for row in described]
        pairs = None if self.text_pair is None else columns[self.text_pair]
        return None if self.key is None else columns[self.key], columns[self.text], metadata, pairs


def show_names(names: Sequence[str]) -> str:
    """List column names for a message. Names that look like content of the file are only counted."""
    known = [repr(name) for name in names if _SHOWN.fullmatch(name)][:20]
    if len(known) < len(names):
        known.append(f"{len(names) - len(known)} more")
    return ", ".join(known) or "none"
