"""The table of conversions: what a value of any source is as a key, as a text and as metadata.

| value | key | text | metadata |
| --- | --- | --- | --- |
| text | itself | itself | itself |
| null, NaN, NaT | refused | missing | null |
| integer of any size, finite decimal | its digits | its digits | a number |
| finite float | refused | its shortest digits | a number |
| NaN or infinity as a float or decimal | refused | missing | null |
| bool | refused | true, false | a bool |
| moment with a zone | RFC 3339 in UTC, 2026-01-02T03:04:05Z | the same | the same |
| moment without a zone, date, time | ISO 8601 | the same | the same |
| duration | ISO 8601, P1DT2S | the same | the same |
| UUID | its digits | the same | the same |
| bytes | UTF-8 | UTF-8 | base64 |
| enum | as its value | as its value | as its value |
| list, set, array | refused | its JSON | a list |
| dictionary, struct, map | refused | its JSON | an object |
| anything else | its text | its text | its text |

A fraction of a second has six digits, or nine if it needs them. Moments that Arrow, polars and NumPy hold as whole
numbers since an epoch become the same texts without Python's own types, which end at the years 1 and 9999, and at the
microsecond. The table needs neither pandas nor pyarrow, and gives
the same with and without them.
"""

import json
import math
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final, Literal, cast

import msgspec

from vectormill.jobs.item import PAIR_MARK, REFUSED_MARK, has_nul, join_pair

# Sorted keys, so that equal metadata are equal bytes.
_ENCODER: Final = msgspec.json.Encoder(order="sorted", decimal_format="number")
_OBJECT_DECODER: Final = msgspec.json.Decoder(dict[str, Any])
MAX_METADATA_DEPTH: Final = 100
MAX_EXPONENT: Final = 307
# JSON that is nested deeper than MAX_METADATA_DEPTH has more brackets than this number of bytes.
SHALLOW_BYTES: Final = 2 * MAX_METADATA_DEPTH
_NAMES: Final = frozenset({str})
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
# A byte that is not UTF-8, and marks neither a pair nor a row that was refused.
_NO_TEXT: Final = b"\xfd"


def spell_moment(moment: datetime) -> str:
    """Return RFC 3339 in UTC, or ISO 8601 without a zone if the moment has none."""
    try:
        moment = moment if moment.tzinfo is None else moment.astimezone(UTC)
    except (OverflowError, ValueError):  # in UTC it is before year 1 or after 9999
        return moment.isoformat()
    return moment.isoformat().replace("+00:00", "Z")


def is_plain(metadata: Any) -> bool:
    """Return whether a dictionary has only values that are JSON as they are, and no list or object among them."""
    return (
        type(metadata) is dict
        and _PLAIN.issuperset(map(type, metadata.values()))
        and _NAMES.issuperset(map(type, metadata))
    )


def make_plain(value: Any) -> Any:  # noqa: C901 - a row of the table each
    """Return a value as JSON can hold it: what its column `metadata` of the table says."""
    kind = type(value)
    if kind in _PLAIN:
        return value if kind is not float or math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {spell_name(name): make_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | Set):
        return [make_plain(inner) for inner in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Enum):
        return make_plain(value.value)
    if is_missing(value):
        return None
    if isinstance(value, Decimal):
        if not value.is_finite():
            return None
        # Readers of JSON refuse a number beyond those of floats, and Postgres one with thousands of decimals.
        fits = value.adjusted() <= MAX_EXPONENT and cast("int", value.as_tuple().exponent) >= -MAX_EXPONENT
        return value if fits else str(value)
    if isinstance(value, datetime):
        return spell_moment(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        # Those of pandas have nanoseconds too.
        num_micros = value // timedelta(microseconds=1)
        return spell_duration(num_micros * 1000 + getattr(value, "nanoseconds", 0), "ns")
    if isinstance(value, str | int | float):
        return make_plain(next(base for base in (str, int, float) if isinstance(value, base))(value))
    if getattr(getattr(value, "dtype", None), "kind", None) in ("m", "M"):  # of NumPy, or a Series of pandas
        return [make_plain(inner) for inner in value] if value.ndim else spell_numpy(value)
    for convert in ("tolist", "to_list", "as_py"):  # of NumPy and pandas, polars, pyarrow
        if hasattr(value, convert):
            return make_plain(getattr(value, convert)())
    return str(value)


def is_missing(value: Any) -> bool:
    """Return whether a value is null, NA of pandas, or no number or time and so not equal to itself; no array is."""
    if value is None or type(value).__name__ == "NAType":
        return True
    try:
        is_other = value != value
    except ArithmeticError:  # a signaling NaN
        return True
    return not hasattr(is_other, "__len__") and bool(is_other)


def spell_name(name: Any) -> str:
    """Return the name of a field, which in a map may be any value, as the text of that value."""
    text = spell_text(name)
    return "null" if text is None else text if isinstance(text, str) else text.decode("utf-8", "replace")


def spell_text(value: Any) -> str | bytes | None:
    """Return a value as a text; None if it is missing. Bytes stay bytes, so that those that are no UTF-8 fail alone."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    try:
        plain = make_plain(value)
        if plain is None or isinstance(plain, str | bytes):
            return plain
        return _ENCODER.encode(plain).decode()
    except (UnicodeEncodeError, RecursionError, TypeError, ValueError, OverflowError):
        return None


def encode_text(value: Any) -> bytes:
    """Return the text of a value as UTF-8, empty if it is missing. What is no UTF-8 is kept, and its item fails."""
    text = spell_text(value)
    if text is None:
        return b""
    if isinstance(text, bytes):
        return text.replace(PAIR_MARK, _NO_TEXT).replace(REFUSED_MARK, _NO_TEXT)
    return text.encode("utf-8", "surrogatepass")


def encode_texts(values: Sequence[Any]) -> list[bytes]:
    """Return the texts of values as `encode_text` does."""
    try:
        return [text.encode() for text in values]
    except (AttributeError, UnicodeEncodeError):
        return list(map(encode_text, values))


def join_pairs(texts: Sequence[bytes], pairs: Sequence[Any]) -> list[bytes]:
    """Join each text with the second one that is a value of the table; where that is missing, the text is no pair."""
    seconds = map(spell_text, pairs)
    return [
        text if second is None else join_pair(text, encode_text(second))
        for text, second in zip(texts, seconds, strict=True)
    ]


def spell_key(value: Any) -> str:
    """Return a value as a key. Raise ValueError, with the reason, for a type that is none."""
    if type(value) is str:
        return value
    if is_missing(value):
        raise ValueError("the key is null; every row needs a key")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "surrogateescape")
    told = "a value"
    try:
        plain = make_plain(value)
        if plain is not None and not isinstance(plain, bool | float | dict | list):
            return str(plain)
        told = shorten(str(value))
    except (RecursionError, ValueError):
        pass
    raise ValueError(f"the key must be text or a whole number; got {told}, a {type(value).__name__}")


def find_key_fault(key: str, max_key_bytes: int) -> str | None:
    """Return the reason why Postgres cannot store this key; None if it can."""
    try:
        num_bytes = len(key.encode())
    except UnicodeEncodeError:
        return "the key is not valid Unicode: it is not UTF-8, or contains half of a UTF-16 surrogate pair"
    if not 0 < num_bytes <= max_key_bytes:
        return f"the key has {num_bytes} bytes; the limit is {max_key_bytes}" if key else "the key is empty"
    return "the key contains a NUL character (U+0000)" if "\0" in key else None


def are_sound_keys(keys: Sequence[str], max_key_bytes: int) -> bool:
    """Return whether `find_key_fault` finds nothing in any of the keys, some hundred times as fast."""
    try:
        encoded = list(map(str.encode, keys))
    except UnicodeEncodeError:
        return False
    lengths = list(map(len, encoded))
    return not lengths or (
        min(lengths) > 0 and max(lengths) <= max_key_bytes and b"\0" not in b"".join(encoded)
    )


def encode_metadata(metadata: Any, *, is_json: bool = False) -> bytes:
    """Encode an object, given as a dictionary or as JSON, with sorted keys and no white space.

    With `is_json` the dictionary was decoded from JSON and needs no conversion. Raise ValueError, whose text goes on
    after "the metadata", for anything else, and for what jsonb cannot hold.
    """
    if type(metadata) is not dict and isinstance(metadata, str | bytes | bytearray | memoryview):
        try:
            metadata = _OBJECT_DECODER.decode(metadata)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise ValueError("is not a JSON object") from None
    if type(metadata) is not dict and not isinstance(metadata, Mapping):
        raise ValueError("is not a JSON object")
    try:
        if not is_json and not is_plain(metadata):
            metadata = make_plain(metadata)
        encoded = _ENCODER.encode(metadata)
    except UnicodeEncodeError:
        raise ValueError("contains half of a UTF-16 surrogate pair") from None
    except RecursionError:
        raise ValueError(f"is nested more than {MAX_METADATA_DEPTH} levels deep") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"is not representable as JSON ({error})") from None
    if len(encoded) > SHALLOW_BYTES:
        num_brackets = encoded.count(b"{") + encoded.count(b"[")
        if num_brackets > MAX_METADATA_DEPTH and _measure_depth(metadata) > MAX_METADATA_DEPTH:
            raise ValueError(f"is nested more than {MAX_METADATA_DEPTH} levels deep")
    if has_nul(encoded):
        raise ValueError("contains a NUL character (U+0000)")
    return encoded


def encode_fitting_metadata(metadata: Any) -> tuple[bytes, str | None]:
    """Encode the fields of an object that can be kept. Return them, and the reason why others are left out."""
    try:
        return encode_metadata(metadata), None
    except ValueError as error:
        reason = str(error)
    if isinstance(metadata, bytes | bytearray | memoryview):
        metadata = bytes(metadata).decode("utf-8", "surrogateescape")
    with suppress(ValueError, RecursionError):
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    if not isinstance(metadata, Mapping):
        return b"", reason
    kept = {}
    for name, value in metadata.items():
        try:
            encode_metadata({name: value})
            kept[name] = value
        except ValueError:
            continue
    return encode_metadata(kept) if kept else b"", reason


def _measure_depth(value: Any) -> int:
    """Return the depth of nesting of objects and lists, without recursion, which Python limits."""
    depth, layer = 0, [value]
    while layer := [inner for inner in layer if isinstance(inner, dict | list)]:
        depth += 1
        layer = [part for inner in layer for part in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def shorten(text: str) -> str:
    """Quote a value for a message, shortened if it is long."""
    return repr(text if len(text) <= 80 else text[:77] + "…")


_FRACTION_DIGITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}

Kind = Literal["moment", "moment in UTC", "date", "time"]


def spell_instants(ints: Sequence[int | None], unit: str, kind: Kind) -> list[str | None]:
    """Return the texts of instants in a unit of NumPy: D, s, ms, us or ns."""
    import numpy as np

    written = np.datetime_as_string(np.array([value or 0 for value in ints], f"M8[{unit}]")).tolist()
    return [
        None if value is None or text == "NaT" else _finish(text, kind)
        for value, text in zip(ints, written, strict=True)
    ]


def spell_numpy(value: Any) -> str:
    """Return the text of a datetime64 or timedelta64 of NumPy, of any unit."""
    kind, unit = value.dtype.kind, value.dtype.str.partition("[")[2].rstrip("]").lstrip("0123456789")
    if kind == "M" and unit in ("Y", "M", "W", "D"):
        return str(value.astype("M8[D]"))
    unit = unit if unit in _FRACTION_DIGITS else "s" if unit in ("Y", "M", "W", "D", "h", "m") else "ns"
    number = int(value.astype(f"{kind}8[{unit}]").astype("int64"))
    return str(spell_instants([number], unit, "moment")[0]) if kind == "M" else spell_duration(number, unit)


def _finish(written: str, kind: Kind) -> str:
    if kind == "time":
        return _trim(written.partition("T")[2])
    year = written.partition("-")[0]
    # ISO 8601 requires a sign before a year of five digits.
    return ("+" if len(year) > 4 else "") + _trim(written) + ("Z" if kind == "moment in UTC" else "")


def _trim(written: str) -> str:
    """Return a moment whose fraction has no digits, six or nine."""
    whole, _, fraction = written.partition(".")
    digits = fraction.rstrip("0")
    return f"{whole}.{digits.ljust(6 if len(digits) <= 6 else 9, '0')}" if digits else whole


def spell_duration(value: int, unit: str) -> str:
    """Return an ISO 8601 duration, as msgspec writes those of Python."""
    sign, value = "-" if value < 0 else "", abs(value)
    scale = 10 ** _FRACTION_DIGITS[unit]
    days, rest = divmod(value, 86_400 * scale)
    seconds, fraction = divmod(rest, scale)
    digits = str(fraction).rjust(_FRACTION_DIGITS[unit], "0").rstrip("0") if fraction else ""
    written = f"{seconds}.{digits}" if digits else f"{seconds}"
    return f"{sign}P{f'{days}D' if days or not rest else ''}{f'T{written}S' if rest else ''}"
