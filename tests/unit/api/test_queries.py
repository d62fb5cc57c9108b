"""A query is encoded for the space of its collection."""

import pytest

from api.queries import MAX_BYTES, MAX_TEXTS, cut_parts, make_query_spec
from tests.protocol import SPEC
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec


@pytest.mark.parametrize(
    ("of_collection", "of_query"),
    [
        ("truncate", "truncate"),
        ("fail", "truncate"),  # a long query is never refused
        ("passages", "passages"),  # a long query is compared in the space of the long texts
    ],
)
def test_a_long_query_is_encoded_as_the_long_texts_of_its_collection_are(
    of_collection: str, of_query: str
) -> None:
    registry = Registry({})
    spec = make_spec(registry.card(DEFAULT_MODEL), EncodingOptions(long_texts=of_collection))
    query_spec = make_query_spec(registry, spec)
    assert query_spec.long_texts == of_query
    assert query_spec.fingerprint() == spec.fingerprint()


def test_the_texts_of_a_request_are_cut_into_parts_of_one_message() -> None:
    long = b"x" * (MAX_BYTES // 2)
    texts = [b"a"] * (MAX_TEXTS + 1) + [long, long, long, b"y" * (3 * MAX_BYTES), b"z"]
    parts = list(cut_parts(SPEC, texts))
    assert [text for part in parts for text in part] == texts
    assert all(len(part) <= MAX_TEXTS for part in parts)
    assert all(len(part) == 1 or sum(map(len, part)) <= MAX_BYTES for part in parts)
    assert list(map(len, parts)) == [MAX_TEXTS, 2, 2, 1, 1]
