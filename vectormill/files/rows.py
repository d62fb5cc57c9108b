"""Rows: how a row with named fields becomes an item. Knows nothing of the file that the row stood in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from vectormill.domain.errors import InvalidItem
from vectormill.files.ndjson import ItemJson

KEY_FIELDS: Final = ("key", "id")

# Error handlers of Python's decoders, for input that is not UTF-8. A bad byte that is kept as half of a surrogate pair
# makes its item, and no other, one of the job's item errors; the strict way, reading ends with an InvalidItem.
UnicodeErrors = Literal["surrogateescape", "strict"]
FAIL_ALONE: Final = "surrogateescape"
REFUSE: Final = "strict"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a row that hold key, text and pair, and what becomes of bytes that are not UTF-8.

    Without `key`: `key`, else `id`, else the number of the line. Without `pair` no second text is read.
    """

    key: str | None = None
    text: str = "text"
    pair: str | None = None
    errors: UnicodeErrors = FAIL_ALONE


def make_item(row: Mapping[str, Any], fields: Fields, number: int, place: str) -> ItemJson:
    """Return the item of one row; `number` counts rows or lines from 1, `place` names it in errors.

    A `metadata` field goes along when it is an object. Raise InvalidItem.
    """
    text = row.get(fields.text)
    if not isinstance(text, str):
        raise InvalidItem(f"{place}: {_describe_missing(row, fields.text, text)}")
    item: ItemJson = {"key": _find_key(row, fields, number, place), "text": text}
    if fields.pair is not None and (pair := row.get(fields.pair)) is not None:
        if not isinstance(pair, str):
            raise InvalidItem(f"{place}: {_describe_missing(row, fields.pair, pair)}")
        item["text_pair"] = pair
    metadata = row.get("metadata")
    if isinstance(metadata, Mapping):
        item["metadata"] = metadata
    return item


def _find_key(row: Mapping[str, Any], fields: Fields, number: int, place: str) -> str:
    names: Iterable[str] = KEY_FIELDS if fields.key is None else (fields.key,)
    for name in names:
        key = row.get(name)
        if key is None:
            continue
        if isinstance(key, bool | float) or not isinstance(key, str | int):
            raise InvalidItem(
                f"{place}: the key in field {name!r} must be a string or a whole number, not {key!r}."
            )
        return str(key)
    if fields.key is not None:
        raise InvalidItem(f"{place}: {_describe_missing(row, fields.key, None)}")
    return str(number)


def _describe_missing(row: Mapping[str, Any], name: str, value: Any) -> str:
    if value is not None:
        return f"the field {name!r} must hold a string, not {type(value).__name__}."
    if name in row:
        return f"the field {name!r} is empty."
    known = ", ".join(repr(field) for field in list(row)[:10]) or "none"
    return (
        f"there is no field {name!r}; its fields are {known}. Name others with --text-field and --key-field."
    )
