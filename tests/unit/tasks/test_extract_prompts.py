"""Schemas, prompts, ids, positions, masks and offsets of an extraction, exactly those of the golden data."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.rexuninlu import (
    GOLDEN,
    Case,
    FromCase,
    by_network,
    extract_of,
    has_all_logits,
    list_cases,
    load,
    load_tokenizer,
    read_arrays,
)
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
from vectormill.ragged import Ragged
from worker.batching.batch import POSITION_IDS, PREFIX_BLOCKS, TYPE_SEGMENTS
from worker.tasks.extract.extract import Prompts
from worker.tasks.extract.prompts import ADDED_TOKENS, Hint, HintWriter, Window, cut_windows, lay_out


def see(blocks: NDArray[np.int32], segments: NDArray[np.int32]) -> NDArray[np.bool_]:
    """The mask that two numbers a token stand for."""
    mask = np.ones((len(blocks), len(blocks)), np.bool_)
    for numbers in (blocks, segments):
        row, column = numbers[:, None], numbers[None]
        mask &= (row == 0) | (column == 0) | (row == column)
    return mask


def test_every_sequence_is_the_references() -> None:
    for case in list_cases():
        check_case(case)


def check_case(case: Case) -> None:
    """Compare with the logits that a case has, or the network's own where the data keeps only a sample."""
    extraction = extract_of(case)
    compute = FromCase(case) if has_all_logits(case) else by_network(load(case["model"]))
    calls = iter(case["calls"])
    levels: list[list[Hint]] = []
    num_calls = 0

    def check(prompts: Prompts) -> Ragged:
        nonlocal num_calls
        windows = [window for _, window in extraction._asked]
        levels.append(list(dict.fromkeys(window.hint for window in windows)))
        for number, window in enumerate(windows):
            num_calls += 1
            if (call := next(calls, None)) is not None:
                check_call(call, prompts, number, window)
        return compute(prompts)

    prompts = extraction.start()
    while prompts is not None:
        prompts = extraction.take(check(prompts))
    assert num_calls == case["num_calls"], case["id"]
    asked = [level for level in case["levels"] if level["num_hints"]]
    for hints, level in zip(levels, asked, strict=True):
        check_hints(hints, level)


def check_hints(hints: list[Hint], level: dict[str, Any]) -> None:
    """Of a level with many hints the data has the first."""
    assert len(hints) == level["num_hints"]
    assert [hint.text for hint in hints[: len(level["hints"])]] == level["hints"]
    for hint, types in zip(hints, level["types"], strict=False):
        found = [[*question, char] for question, char in zip(hint.questions, hint.type_chars, strict=True)]
        assert json.loads(json.dumps(found)) == types


def check_call(call: dict[str, Any], prompts: Prompts, number: int, window: Window) -> None:
    key, tokens = call["key"], window.tokens
    inputs = {name: rows.row(number) for name, rows in prompts.inputs.items()}
    found = {
        "input_ids": inputs["input_ids"],
        "token_type_ids": inputs["token_type_ids"],
        "position_ids": inputs[POSITION_IDS],
        "offsets": np.stack([tokens.starts, tokens.ends], axis=1),
    }
    for name, values in found.items():
        stored = read_arrays().get(f"{key}/{name}")
        np.testing.assert_array_equal(values, call[name] if stored is None else stored, f"{key} {name}")
    mask = read_arrays().get(f"{key}/mask")
    if mask is not None:
        np.testing.assert_array_equal(see(inputs[PREFIX_BLOCKS], inputs[TYPE_SEGMENTS]), mask, f"{key} mask")
    assert window.num_hint_tokens == call["num_hint_tokens"]


# Of both vocabularies, and what tokenizers stumble over.
CHARACTERS = "林晓峰上周在苏州参观了晨光机械厂。abcXYZ 019  \t\n😀é囍[](),:"
WORDS = [*CHARACTERS, *ADDED_TOKENS, "[SEP]", "[CLS]", "[MASK]", "[TY", "PE]"]


@pytest.mark.parametrize("model", ["model", "model_b"])
@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=60),
    types=st.lists(st.text(CHARACTERS, min_size=1, max_size=8), min_size=1, max_size=5, unique=True),
    copies=st.sampled_from([1, 1, 40]),
)
def test_joined_tokens_are_those_of_the_whole_prompt(
    model: str, words: list[str], types: list[str], copies: int
) -> None:
    """The library tokenizes, joins and cuts the pair itself, as the reference has it do."""
    tokenizer, text = load_tokenizer(model), "".join(words) * copies
    hint = HintWriter(tokenizer, types).write([{(): dict.fromkeys(types)}])[0].hints[0]
    (tokens,) = tokenizer.encode([text])
    windows = list(cut_windows(hint, text, tokens, tokenizer, 32))
    library = make_library_tokenizer(model)
    # transformers gives an empty text to the library as no text at all.
    whole = library.encode(hint.text, text) if text else library.encode(hint.text)
    encodings = [whole, *whole.overflowing]
    assert [window.tokens.ids.tolist() for window in windows] == [encoding.ids for encoding in encodings]
    for window, encoding in zip(windows, encodings, strict=True):
        assert list(zip(window.tokens.starts, window.tokens.ends, strict=True)) == encoding.offsets
        if any(encoding.type_ids):  # else they are rebuilt, as the cases show
            assert window.type_ids.tolist() == encoding.type_ids


def make_library_tokenizer(model: str) -> Tokenizer:
    library = Tokenizer.from_file(str(GOLDEN / model / "tokenizer.json"))
    library.add_special_tokens(["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"])
    library.add_special_tokens(list(ADDED_TOKENS))
    library.enable_truncation(512, stride=32, strategy="only_second")
    return library


TOKENIZER = load_tokenizer("model")
CLS, SEP = TOKENIZER.cls_id, TOKENIZER.sep_id
PREFIX, TYPE = TOKENIZER.prefix_id, TOKENIZER.type_id
WORD = 5


def lay_out_token_by_token(ids: list[int]) -> tuple[list[int], NDArray[np.bool_]] | None:
    """Positions and mask of one sequence; None where a path has no type and there are others."""
    paths: list[tuple[list[int], list[list[int]]]] = []
    text: list[int] = []
    segment: list[int] = []
    for place, token in enumerate(ids[1:], start=1):
        if token == PREFIX:
            segment = [place]
            paths.append((segment, []))
        elif token == TYPE:
            segment = [place]
            paths[-1][1].append(segment)
        elif token == SEP:
            segment = text
            text.append(place)
        else:
            segment.append(place)
    if len(paths) > 1 and any(not types for _, types in paths):
        return None
    positions = [0]
    for path, types in paths:
        positions += range(1, 1 + len(path))
        for kind in types:
            positions += range(1 + len(path), 1 + len(path) + len(kind))
    positions += range(max(positions) + 1, max(positions) + 1 + len(text))
    mask = np.ones((len(ids), len(ids)), np.bool_)
    blocks = [(path[0], types[-1][-1]) for path, types in paths if types]
    segments = [[(kind[0], kind[-1]) for kind in types] for _, types in paths]
    for group in [blocks, *segments]:
        for one, (first, last) in enumerate(group):
            for other, (start, end) in enumerate(group):
                if one != other:
                    mask[first : last + 1, start : end + 1] = False
    return positions, mask


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([WORD, WORD, WORD, TYPE, TYPE, SEP, PREFIX]), max_size=24),
        min_size=1,
        max_size=4,
    )
)
def test_a_layout_is_the_references_of_each_sequence(tails: list[list[int]]) -> None:
    sequences = [[CLS, PREFIX, *tail] for tail in tails]
    ids = Ragged.from_rows([np.array(sequence) for sequence in sequences], np.int32)
    layout = lay_out(ids, TOKENIZER)
    for number, sequence in enumerate(sequences):
        rows = slice(ids.offsets[number], ids.offsets[number + 1])
        wanted = lay_out_token_by_token(sequence)
        assert layout.is_whole[number] == (wanted is not None)
        if wanted is not None:
            positions, mask = wanted
            assert layout.position_ids[rows].tolist() == positions
            np.testing.assert_array_equal(see(layout.prefix_blocks[rows], layout.type_segments[rows]), mask)


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
        (None, ["schema: must name at least one type"]),
        ({}, ["schema: must name at least one type"]),
        (["人物"], ["schema: must be null or an object", "got list ['人物']"]),
        ({"人物": ["出生地"]}, ["schema.人物: must be null or an object", "got list"]),
        ({"人物": {"出生地": 3}}, ["schema.人物.出生地: must be null", "got int 3"]),
        ({"人物": {"": None}}, ["schema.人物: the name of a type must not be empty; got ''"]),
        ({"人物": {"  ": None}}, ["schema.人物: the name of a type must not be empty; got '  '"]),
        (
            {"人物": {" 出生地": None}},
            ["schema.人物. 出生地: must not begin or end with whitespace", "'出生地'"],
        ),
        ({"人物\n": None}, ["must not begin or end with whitespace"]),
        ({1: None}, ["schema: names of types must be strings; got int 1"]),
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
        ("{", ["schema: not valid JSON", "line 1"]),
        ('{"a":' * 100_000 + "null" + "}" * 100_000, ["schema: ", f"at most {MAX_DEPTH}"]),
        ("[" * 100_000, ["schema: ", f"at most {MAX_DEPTH}"]),
        ('{"人物": {"职务": null, "a": null, "职务": {"b": null}}}', ["schema.人物.职务: duplicate type"]),
        ('{"a": null, "a": null}', ["schema.a: duplicate type"]),
        (" " * (MAX_SCHEMA_CHARS + 1), ["schema: the JSON has", "characters"]),
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
