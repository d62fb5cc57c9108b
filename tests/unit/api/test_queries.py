"""A query is encoded for the space of its collection."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from api.queries.encoding import make_query_spec
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
    query_spec = make_query_spec(cast(Any, SimpleNamespace(registry=registry)), spec)
    assert query_spec.long_texts == of_query
    assert query_spec.fingerprint() == spec.fingerprint()
