"""Which searches share a statement."""

from typing import Any

from vectormill.search.filter import parse_filter
from vectormill.search.matches import MAX_BATCH_SEARCHES, MOST_ROWS, divide_into_batches
from vectormill.search.search import VECTOR, Search

FILTER = parse_filter({"a": 1})


def test_searches_that_share_a_statement() -> None:
    cases: list[tuple[Any, Any, str]] = [
        ({}, {"min_score": 0.5}, "scores are compared afterwards"),
        ({"condition": FILTER}, {"condition": parse_filter({"a": 1})}, "the same filter"),
    ]
    for options, others, reason in cases:
        assert divide_into_batches([Search(**options), Search(**others)]) == [[0, 1]], reason


def test_searches_that_do_not() -> None:
    cases: list[tuple[Any, Any, str]] = [
        ({"offset": 10}, {"offset": 10}, "pages are compared"),
        ({}, {"limit": 11}, "an index may find nearer ones for more"),
        ({}, {"ef_search": 100}, "said by the client"),
        ({}, {"include": ()}, "other columns"),
        ({}, {"condition": FILTER}, "a filter"),
        ({"condition": FILTER}, {"condition": parse_filter({"a": True})}, "another filter"),
        ({"like": "k"}, {"like": "k"}, "the row's vector is looked up"),
        ({"mode": "hybrid", "words": "a"}, {"mode": "hybrid", "words": "a"}, "words"),
        ({"by_document": True}, {"by_document": True}, "asked again until there are enough"),
        ({"include": (VECTOR,)}, {"include": (VECTOR,)}, "long answers"),
        ({"limit": MOST_ROWS + 1}, {"limit": MOST_ROWS + 1}, "long answers"),
    ]
    for options, others, reason in cases:
        assert divide_into_batches([Search(**options), Search(**others)]) == [[0], [1]], reason


def test_rounds_have_a_bound_and_keep_the_order_of_what_is_alike() -> None:
    searches = [Search(), Search(limit=200)] * (MAX_BATCH_SEARCHES + 1)
    rounds = divide_into_batches(searches)
    assert sorted(place for places in rounds for place in places) == list(range(len(searches)))
    assert sorted(map(len, rounds), reverse=True)[:2] == [MAX_BATCH_SEARCHES, 1]
    assert rounds[0] == list(range(0, 2 * MAX_BATCH_SEARCHES, 2))
