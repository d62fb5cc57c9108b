"""Prompts, ids, type ids, positions, masks and offsets of every call of the golden data, exactly."""

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
from vectormill.ragged import Ragged
from worker.batching.batch import POSITION_IDS, PREFIX_BLOCKS, TYPE_SEGMENTS
from worker.tasks.extract.extraction import Prompts
from worker.tasks.extract.prompts import ADDED_TOKENS, Hint, HintWriter, Window, cut_windows


def see(blocks: NDArray[np.int32], segments: NDArray[np.int32]) -> NDArray[np.bool_]:
    """The mask that two numbers a token stand for."""
    mask = np.ones((len(blocks), len(blocks)), np.bool_)
    for numbers in (blocks, segments):
        row, column = numbers[:, None], numbers[None]
        mask &= (row == 0) | (column == 0) | (row == column)
    return mask


@pytest.mark.parametrize("case", list_cases(), ids=lambda case: case["id"])
def test_every_sequence_is_the_references(case: Case) -> None:
    """With the logits that a case has, or the network's own where the data keeps only a sample."""
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
    assert num_calls == case["num_calls"]
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
