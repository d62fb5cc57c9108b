"""A format has one row; whoever reads, writes or offers formats knows just those of the table."""

from typing import get_args

from api.streams.row_streams import NPY, ROW_FORMATS
from vectormill.files.formats import (
    INPUT_FORMATS,
    OUTPUT_FORMATS,
    InputName,
    OutputName,
    RowsName,
    by_suffix,
)
from vectormill.rows.decoding import DELIMITERS, JSONL, PARQUET
from vectormill.rows.inputs import FORMAT_OF_SUFFIX


def test_what_type_checkers_see_are_the_formats_of_the_table() -> None:
    assert set(get_args(InputName)) == {row.name for row in INPUT_FORMATS}
    assert set(get_args(OutputName)) == set(OUTPUT_FORMATS)
    assert set(get_args(RowsName)) == {name for name, row in OUTPUT_FORMATS.items() if row.has_keys}


def test_every_format_is_written_by_the_api() -> None:
    assert {NPY, *ROW_FORMATS} == set(OUTPUT_FORMATS)
    assert set(ROW_FORMATS) == set(get_args(RowsName))


def test_every_format_is_read() -> None:
    names = [row.name for row in INPUT_FORMATS]
    assert [JSONL, *DELIMITERS, PARQUET] == names
    assert set(FORMAT_OF_SUFFIX.values()) == set(names)


def test_no_suffix_tells_two_formats() -> None:
    for rows in (INPUT_FORMATS, OUTPUT_FORMATS.values()):
        assert len(by_suffix(rows)) == sum(len(row.suffixes) for row in rows)
