import json
from typing import Any

import pytest

from tests.rexuninlu import list_cases
from vectormill.domain.errors import InvalidOption
from vectormill.domain.schema import (
    MAX_DEPTH,
    MAX_SCHEMA_CHARS,
    MAX_TYPE_CHARS,
    MAX_TYPES,
    RESERVED_TOKENS,
    check_schema,
    list_leaves,
    list_types,
    parse_schema,
)


def nest(depth: int) -> Any:
    return {f"层{depth}": nest(depth - 1)} if depth else None


def test_types_are_put_in_the_order_of_their_code_points_at_every_depth() -> None:
    checked = check_schema({"时间": None, "b": {"z": {}, "a": None}, "Zeta": None})
    assert (
        json.dumps(checked, ensure_ascii=False) == '{"Zeta": null, "b": {"a": null, "z": null}, "时间": null}'
    )
    assert list(list_types(checked)) == [("Zeta",), ("b",), ("b", "a"), ("b", "z"), ("时间",)]
    assert set(list_leaves(checked)) == {("Zeta",), ("b", "a"), ("b", "z"), ("时间",)}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (None, ["schema: names no type"]),
        ({}, ["schema: names no type"]),
        (["人物"], ["schema: is list ['人物']", "null, or an object"]),
        ({"人物": ["出生地"]}, ["schema.人物: is list", "null, or an object"]),
        ({"人物": {"出生地": 3}}, ["schema.人物.出生地: is int 3"]),
        ({"人物": {"": None}}, ["schema.人物: has a type '', which is empty"]),
        ({"人物": {"  ": None}}, ["schema.人物: has a type '  ', which is empty"]),
        ({"人物": {" 出生地": None}}, ["schema.人物. 出生地: begins or ends with white space", "'出生地'"]),
        ({"人物\n": None}, ["begins or ends with white space"]),
        ({1: None}, ["schema: has a type that is int 1"]),
        ({"人物": {"a" * (MAX_TYPE_CHARS + 1): None}}, ["schema.人物.aaaa", f"at most {MAX_TYPE_CHARS}"]),
        (nest(MAX_DEPTH + 1), [f"depth {MAX_DEPTH + 1}", f"at most {MAX_DEPTH}", "schema.层9.层8"]),
        ({f"类{number}": None for number in range(MAX_TYPES + 1)}, [f"has {MAX_TYPES + 1} types"]),
        ({"a": {f"类{number}": None for number in range(MAX_TYPES)}}, [f"has {MAX_TYPES + 1} types"]),
        ({"人物": {"a\0b": None}}, ["schema.人物.", "NUL"]),
        ({"人物": {"a\ud800b": None}}, ["schema.人物.", "surrogate"]),
        ({"人物": {"\ud800 ": None}}, ["schema.人物.", "surrogate"]),
        ({"人物": {"\ud800" * (MAX_TYPE_CHARS + 1): None}}, ["schema.人物.", "surrogate"]),
        ({"人物": {"[TYPE]\ud800": None}}, ["schema.人物.", "surrogate"]),
        *(({"人物": {f"的{token}x": None}}, [f"schema.人物.的{token}x", token]) for token in RESERVED_TOKENS),
    ],
)
def test_what_a_schema_must_not_be_is_refused_with_its_place(schema: object, words: list[str]) -> None:
    with pytest.raises(InvalidOption) as refused:
        check_schema(schema)
    message = str(refused.value)
    assert all(word in message for word in words), message
    message.encode()  # without half a surrogate pair, which no answer could carry


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["schema: is not JSON", "line 1"]),
        ('{"a":' * 100_000 + "null" + "}" * 100_000, ["schema: ", f"at most {MAX_DEPTH}"]),
        ("[" * 100_000, ["schema: ", f"at most {MAX_DEPTH}"]),
        ('{"人物": {"职务": null, "a": null, "职务": {"b": null}}}', ["schema.人物.职务: is there twice"]),
        ('{"a": null, "a": null}', ["schema.a: is there twice"]),
        (" " * (MAX_SCHEMA_CHARS + 1), ["schema: has", "characters"]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json_that_is_no_schema_is_refused_with_its_place(content: str, words: list[str]) -> None:
    with pytest.raises(InvalidOption) as refused:
        parse_schema(content)
    message = str(refused.value)
    assert all(word in message for word in words), message


def test_a_schema_is_read_from_json() -> None:
    assert parse_schema('{"b": {}, "a": {"c": null}}') == {"a": {"c": None}, "b": None}


@pytest.mark.parametrize(
    "schema",
    [
        nest(MAX_DEPTH),
        {f"类{number}": None for number in range(MAX_TYPES)},
        {"a" * MAX_TYPE_CHARS: None},
        {"胜负(事件触发词)": {"时间": None}},
    ],
)
def test_schemas_up_to_the_limits_pass(schema: dict[str, Any]) -> None:
    assert check_schema(schema) == schema


def test_the_references_schemas_pass_but_for_what_it_passes_over_in_silence() -> None:
    """Types with outer spaces lose their children there, and types that are too long are not asked for."""
    refused = set()
    for case in list_cases():
        try:
            check_schema(case["schema"])
        except InvalidOption:
            refused.add(case["id"])
    assert refused == {"type_too_long", "all_types_too_long", "type_edge_125", "s_type_with_space"}
