"""Instants: whole numbers since an epoch, as Arrow, polars and NumPy hold moments, as the texts of values.py.

Python's own types end at the years 1 and 9999, and at the microsecond.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

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
