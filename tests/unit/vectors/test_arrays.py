"""Array parameters are laid out as psycopg's own dumper lays them out, which takes a step a value."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import PyFormat, Transformer

from vectormill.db.parameters import BYTEA_OID, TEXT_OID, make_bytes_array, open_array


def dump_plainly(values: Sequence[bytes | None] | Sequence[str]) -> bytes:
    transformer = Transformer()
    content = transformer.get_dumper(values, PyFormat.BINARY).dump(values)
    assert content is not None
    return bytes(content)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1))
def test_texts_of_any_length_are_an_array_of_text(texts: list[str]) -> None:
    array = make_bytes_array(TEXT_OID, [text.encode() for text in texts])
    assert bytes(array.content) == dump_plainly(texts)


@given(st.lists(st.binary(), min_size=1))
def test_values_are_an_array_of_bytea_and_an_empty_one_is_null_where_it_is_to_be(values: list[bytes]) -> None:
    assert bytes(make_bytes_array(BYTEA_OID, values).content) == dump_plainly(values)
    if any(values):  # psycopg knows no type for NULLs alone
        array = make_bytes_array(BYTEA_OID, values, empty_is_null=True)
        assert bytes(array.content) == dump_plainly([value or None for value in values])


@given(st.integers(1, 5), st.integers(0, 9))
def test_elements_of_one_length_are_written_in_place(num_elements: int, element_bytes: int) -> None:
    array, elements = open_array(BYTEA_OID, num_elements, element_bytes)
    elements[:] = np.arange(num_elements * element_bytes, dtype=np.uint8).reshape(elements.shape)
    assert bytes(array.content) == dump_plainly([row.tobytes() for row in elements])
