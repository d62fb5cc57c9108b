"""Arrow: columns of Arrow as Python values, by vectormill/rows/values.py, without pandas and whatever a value is."""

from collections.abc import Iterable
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute

from vectormill.rows.values import spell_duration, spell_instants, spell_name


def list_columns(table: "pa.RecordBatch | pa.Table", names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the values of the named columns of a record batch or table."""
    return {name: list_values(table.column(name)) for name in names}


def list_values(column: Any) -> list[Any]:  # noqa: C901 - a kind of column each
    """Return the values of a column. Moments, dates, times and durations are texts, and so need no library of theirs.

    Bytes in a column of strings that are not UTF-8 become lone surrogates, so that only their item fails.
    """
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in list_values(chunk)]
    kind = column.type
    if isinstance(column, pa.ExtensionArray):
        values = list_values(column.storage)
        is_uuid = kind.extension_name == "arrow.uuid"
        return [value and str(UUID(bytes=value)) for value in values] if is_uuid else values
    if pa.types.is_dictionary(kind):
        return list_values(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return list_values(pa.compute.run_end_decode(column))
    if pa.types.is_timestamp(kind):
        return spell_instants(_to_ints(column), kind.unit, "moment in UTC" if kind.tz else "moment")
    if pa.types.is_date(kind):
        return spell_instants(_to_ints(column.cast(pa.date32(), safe=False)), "D", "date")
    if pa.types.is_time(kind):
        return spell_instants(_to_ints(column), kind.unit, "time")
    if pa.types.is_duration(kind):
        return [None if value is None else spell_duration(value, kind.unit) for value in _to_ints(column)]
    if pa.types.is_struct(kind):
        fields = [(field.name, list_values(column.field(place))) for place, field in enumerate(kind)]
        rows = zip(*(values for _, values in fields), strict=True) if fields else ((),) * len(column)
        names = [name for name, _ in fields]
        valid = column.is_valid().to_pylist()
        return [
            dict(zip(names, row, strict=True)) if is_there else None
            for row, is_there in zip(rows, valid, strict=True)
        ]
    if pa.types.is_map(kind):
        return [
            None
            if row is None
            else dict(zip(map(spell_name, list_values(row.field(0))), list_values(row.field(1)), strict=True))
            for row in (scalar.values for scalar in column)
        ]
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        value = kind.value_type
        if pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value):
            return list(column.to_pylist())
        return [None if row is None else list_values(row) for row in (scalar.values for scalar in column)]
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [
            None if value is None else value.decode("utf-8", "surrogateescape")
            for value in column.cast(pa.large_binary()).to_pylist()
        ]


def _to_ints(column: pa.Array) -> list[int | None]:
    width = pa.int32() if column.type.bit_width == 32 else pa.int64()
    return list(column.view(width).to_pylist())
