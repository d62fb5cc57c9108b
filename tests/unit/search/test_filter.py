"""A filter is read as it was meant, or refused with the place at fault."""

from typing import Any

import pytest

from tests.metadata_filters import fits
from vectormill.domain.errors import InvalidOption
from vectormill.search.filter import (
    MAX_CONDITIONS,
    MAX_LISTED,
    AllOf,
    Contains,
    Exists,
    FieldRange,
    Not,
    OneOf,
    parse_filter,
    read_filter,
)


def test_every_entry_of_a_filter_is_a_condition() -> None:
    written = {
        "lang": "de",
        "year": {"gte": 2020, "lt": 2025},
        "tag": {"in": ["a", "b"]},
        "author": {"exists": True},
        "a.b": {"ne": None},
        "words": {"contains": "x"},
    }
    assert parse_filter(written) == AllOf(
        (
            OneOf(("lang",), ("de",)),
            FieldRange(("year",), "gte", 2020),
            FieldRange(("year",), "lt", 2025),
            OneOf(("tag",), ("a", "b")),
            Exists(("author",)),
            Not(OneOf(("a", "b"), (None,))),
            Contains(("words",), "x"),
        )
    )


def test_a_filter_finds_what_it_says() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
        ({}, {}, True),
        ({"n": 1}, {"n": 1.0}, True),
        ({"n": 1}, {"n": True}, False),  # to Python both are one
        ({"n": 1}, {"n": "1"}, False),
        ({"n": None}, {"n": None}, True),
        ({"n": None}, {}, False),
        ({"n": {"ne": 1}}, {}, True),  # what is not there is not 1
        ({"n": {"gt": 1}}, {"n": "2"}, False),
        ({"n": {"gt": 1}}, {"n": 2}, True),
        ({"n": {"gte": "b"}}, {"n": "b"}, True),
        ({"n": {"exists": True}}, {"n": None}, True),
        ({"n": {"exists": False}}, {}, True),
        ({"a.b": 1}, {"a": {"b": 1}}, True),
        ({"a.b": 1}, {"a.b": 1}, False),  # a dot leads into an object
        ({'"a.b"': 1}, {"a.b": 1}, True),  # unless the name stands in quotes
        ({'"a.b"': 1}, {"a": {"b": 1}}, False),
        ({'a."b.c"."d""e"': 1}, {"a": {"b.c": {'d"e': 1}}}, True),
        ({'"and"': 1, '"not"': 2}, {"and": 1, "not": 2}, True),
        ({'""': 1}, {"": 1}, True),
        ({'a"b': 1}, {'a"b': 1}, True),
        ({"a.0": 1}, {"a": [1]}, False),  # and never into a list
        ({"t": {"contains": 1}}, {"t": [2, 1]}, True),
        ({"t": {"contains": 1}}, {"t": 1}, False),
        ({"t": {"in": []}}, {"t": 1}, False),
        ({"or": [{"a": 1}, {"b": 1}]}, {"b": 1}, True),
        ({"not": {"a": 1}, "b": 1}, {"b": 1}, True),
        ({"and": [{"a": 1}, {"b": 1}]}, {"b": 1}, False),
    ]
    for written, metadata, is_found in cases:
        assert fits(parse_filter(written), metadata) is is_found


def test_what_is_no_filter_is_refused_with_its_place() -> None:
    cases: list[tuple[Any, str]] = [
        ([], "filter: a filter must be an object"),
        ({"year": {"gte": True}}, "filter.year.gte: gte takes a number or a string"),
        ({"year": {"above": 1}}, "filter.year.above: unknown operator; expected one of: eq, ne, in"),
        ({"year": {}}, "filter.year: no operator given"),
        (
            {"tags": ["a", "b"]},
            "filter.tags: must be a string, a number, true, false or null; for one of",
        ),
        ({"tag": {"in": "a"}}, "filter.tag.in: in takes a list"),
        ({"tag": {"in": ["a", {}]}}, "filter.tag.in[1]: must be a string"),
        ({"tag": {"in": [1] * (MAX_LISTED + 1)}}, "filter.tag.in: in takes at most 1,000"),
        ({"a": {"exists": 1}}, "filter.a.exists: exists must be true or false"),
        ({"or": [{"a": 1}, {"b": {"lt": None}}]}, "filter.or[1].b.lt: lt takes a number or a string"),
        ({"or": []}, "filter.or: or takes a list of filters"),
        ({"not": [{"a": 1}]}, "filter.not: a filter must be an object"),
        ({"a..b": 1}, "filter.a..b: a field name must not be empty"),
        (
            {'"a.b': 1},
            'filter."a.b: a field name must not be empty before, after or between its dots; one that has',
        ),
        ({'"a"b': 1}, "stands in double quotes"),
        ({'"a".': 1}, "stands in double quotes"),
        ({"": 1}, "filter.: a field name must not be empty"),
        ({"a": "\0"}, "filter.a: contains a NUL"),
        ({"a\ud800": 1}, "filter.a?: contains a NUL character or half"),
        ({"a": 1e301}, "filter.a: a number must be within"),
        ({"a": 10**400}, "filter.a: a number must be within"),
        ({"a": "x" * 10_001}, "filter.a: a string may have at most 10,000"),
        ({str(n): 1 for n in range(MAX_CONDITIONS + 1)}, "filter: more than 100 conditions"),
        (
            {"or": [{str(n): {"gt": 1, "lt": 2} for n in range(60)}]},
            "filter: more than 100 conditions",
        ),
        ({"x" * 1000: 1}, "…: a field name may have at most 500"),
    ]
    for written, said in cases:
        with pytest.raises(InvalidOption) as refused:
            parse_filter(written)
        assert said in str(refused.value)


def test_a_filter_that_is_nested_for_ever_is_refused() -> None:
    written: dict[str, Any] = {"a": 1}
    for _ in range(5000):
        written = {"not": written}
    with pytest.raises(InvalidOption, match="nested more than 8 levels deep"):
        parse_filter(written)


def test_a_name_in_quotes_may_have_the_signs_of_comparisons() -> None:
    assert read_filter('"a.b"=1', "The filter") == {'"a.b"': {"eq": 1}}
    assert read_filter('a."b=""c">=x', "The filter") == {'a."b=""c"': {"gte": "x"}}
    with pytest.raises(InvalidOption, match="expected name=value"):
        read_filter('"a.b=1', "The filter")


def test_a_filter_nested_too_deeply_is_a_text_or_refused() -> None:
    deep = "[" * 100_000
    assert read_filter(f"lang={deep}", "The filter") == {"lang": {"eq": deep}}
    with pytest.raises(InvalidOption, match="not JSON"):
        read_filter('{"a": ' + deep, "The filter")
