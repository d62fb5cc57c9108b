"""Long texts as windows: nothing is left out, nothing counts twice, and texts that fit stay as they are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.jobs.item import EMPTY_TEXT, ENCODING_FAILED, TOO_MANY_TOKENS, ItemFailure
from vectormill.models.registry import find_packaged_model
from vectormill.ragged import Ragged
from worker.tokens import passages as passages_module
from worker.tokens.passages import PassagedTexts, cut_passages, plan_windows
from worker.tokens.tokenized import TokenizedTexts
from worker.tokens.tokenizer import PassageFrame, Tokenizer

MODEL = find_packaged_model()
assert MODEL is not None
TOKENIZER = Tokenizer(MODEL)
CLS, SEP = 101, 102


def tokenized(*rows: list[int]) -> TokenizedTexts:
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    return TokenizedTexts.from_rows(arrays, np.zeros(len(rows), dtype=np.bool_), {})


def frame(max_tokens: int, overlap: int, leading: tuple[int, ...] = (CLS,)) -> PassageFrame:
    return PassageFrame(max_tokens, overlap, np.array(leading, dtype=np.int32), 1)


def rows_of(passaged: PassagedTexts) -> list[list[int]]:
    return [passaged.sequences.ids(row).tolist() for row in range(len(passaged.sequences))]


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 39))
def test_windows_cover_every_token_once_by_weight_and_overlap_as_asked(
    more: int, room: int, overlap: int
) -> None:
    overlap = min(overlap, room - 1)
    num_tokens = room + more
    starts, weights = plan_windows(num_tokens, room, overlap)
    assert starts[0] == 0
    assert starts[-1] + room == num_tokens
    shared = starts[:-1] + room - starts[1:]
    assert (shared[:-1] == overlap).all()
    assert overlap <= shared[-1] < room  # the last window is moved back to be full, but adds at least a token
    assert weights.sum() == num_tokens
    assert (weights >= 1).all()
    seen = np.zeros(num_tokens, dtype=int)
    for start, weight in zip(starts, weights, strict=True):
        assert (
            seen[start + room - weight : start + room] == 0
        ).all()  # new tokens are those no earlier window has
        seen[start : start + room] += 1
    assert (seen > 0).all()


def test_a_long_text_becomes_full_windows_between_its_special_tokens() -> None:
    passaged = cut_passages(tokenized([CLS, 1, 2, SEP], [CLS, *range(1, 9), SEP], [CLS, 9, SEP]), frame(6, 1))
    assert rows_of(passaged) == [
        [CLS, 1, 2, SEP],
        [CLS, 1, 2, 3, 4, SEP],
        [CLS, 4, 5, 6, 7, SEP],
        [CLS, 5, 6, 7, 8, SEP],
        [CLS, 9, SEP],
    ]
    assert passaged.offsets.tolist() == [0, 1, 4, 5]
    assert passaged.weights[1:4].tolist() == [4, 3, 1]
    assert passaged.num_passages.tolist() == [0, 3, 0]
    assert passaged.num_tokens.tolist() == [4, 18, 3]
    assert passaged.truncated.tolist() == [False] * 3


def test_a_prompt_stands_before_every_window_and_is_counted() -> None:
    prompt = "search: "
    text = " ".join(str(number) for number in range(40))
    given_frame = TOKENIZER.frame(prompt, 16, 2)
    assert len(given_frame.leading_ids) == TOKENIZER.count_prompt_tokens(prompt) == 3
    whole = TOKENIZER.tokenize_whole([prompt + text])
    rows = rows_of(cut_passages(whole, given_frame))
    assert {tuple(row[:3]) for row in rows} == {tuple(given_frame.leading_ids.tolist())}
    assert {len(row) for row in rows} == {16}
    assert rows[0] == TOKENIZER.tokenize([prompt + text], 16, truncate=True).ids(0).tolist()
    assert rows[-1][-13:] == whole.ids(0)[-13:].tolist()


def test_a_prompt_whose_last_token_melts_into_the_text_is_repeated_without_it() -> None:
    text = [CLS, 5, 6, 77, 1, 2, 3, 4, SEP]  # the prompt alone is 5, 6, 7; before this text its end became 77
    passaged = cut_passages(tokenized(text), frame(8, 1, (CLS, 5, 6, 7)))
    assert rows_of(passaged) == [[CLS, 5, 6, 77, 1, 2, 3, SEP], [CLS, 5, 6, 1, 2, 3, 4, SEP]]


def test_the_vector_of_a_text_is_the_mean_of_its_windows_by_their_new_tokens() -> None:
    passaged = cut_passages(tokenized([CLS, 1, 2, SEP], [CLS, *range(1, 9), SEP]), frame(6, 1))
    vectors = np.array([[0.1, 7], [1, 0], [0, 1], [8, 8]], dtype=np.float32)
    joined = passaged.join_vectors(Ragged.from_matrix(vectors))
    assert (
        joined[0].tolist() == vectors[0].tolist()
    )  # to the bit: a text that fits is not averaged with anything
    np.testing.assert_allclose(joined[1], [(4 * 1 + 1 * 8) / 8, (3 * 1 + 1 * 8) / 8], rtol=1e-6)
    assert joined.dtype == np.float32


def test_a_text_fails_with_the_first_of_its_windows_that_fails() -> None:
    passaged = cut_passages(tokenized([CLS, *range(1, 9), SEP], [CLS, 1, SEP]), frame(6, 1))
    failures = {row: ItemFailure(ENCODING_FAILED, f"row {row}") for row in (3, 2, 1)}
    joined = passaged.join_failures(failures)
    assert {text: failure.detail for text, failure in joined.items()} == {0: "row 1", 1: "row 3"}


def test_a_text_that_has_failed_keeps_its_place_and_has_no_tokens() -> None:
    texts = tokenized([CLS, *range(1, 9), SEP]).spread([1], 2)
    passaged = cut_passages(texts, frame(6, 1))
    assert passaged.num_tokens.tolist() == [0, 18]
    joined = passaged.join_failures({int(passaged.offsets[0]): ItemFailure(EMPTY_TEXT, "")})
    assert list(joined) == [0]


@pytest.mark.parametrize(
    ("max_tokens", "overlap", "leading", "message"),
    [
        (8, 5, (CLS,), "leave 1 of the 8 tokens of a passage, less than a quarter"),
        (8, 1, (CLS, 1, 2, 3, 4), "the prompt, the special tokens and the passage_overlap of 1 leave 1"),
        (
            8,
            0,
            (CLS, 1, 2, 3, 4, 5, 6, 7, 8),
            "less than a quarter",
        ),  # the prompt alone is longer than a passage
    ],
)
def test_a_window_that_has_too_little_room_for_new_tokens_fails_the_text(
    max_tokens: int, overlap: int, leading: tuple[int, ...], message: str
) -> None:
    passaged = cut_passages(tokenized([CLS, *range(1, 40), SEP]), frame(max_tokens, overlap, leading))
    (failure,) = passaged.sequences.failures.values()
    assert failure.code == TOO_MANY_TOKENS
    assert message in failure.detail


def test_the_number_of_passages_of_a_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages_module, "MAX_PASSAGES", 3)
    exactly = [CLS, *range(1, 11), SEP]  # room 4, overlap 1: 4 + 3 + 3
    passaged = cut_passages(tokenized(exactly, [*exactly, SEP]), frame(6, 1))
    assert passaged.num_passages.tolist() == [3, 0]
    assert "more than 3 passages of 6" in passaged.sequences.failures[3].detail


def test_no_text_and_whole_texts_are_passaged_too() -> None:
    assert cut_passages(tokenized(), frame(6, 1)).num_tokens.tolist() == []
    texts = tokenized([CLS, 1, SEP], [])
    whole = PassagedTexts.whole(texts)
    assert (whole.num_tokens.tolist(), whole.num_passages.tolist()) == ([3, 0], [0, 0])
    vectors = np.ones((2, 4), dtype=np.float32)
    assert np.shares_memory(whole.join_vectors(Ragged.from_matrix(vectors)), vectors)


def test_texts_are_tokenized_in_groups_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.tokens import reference

    texts = ["one two", "three " * 200, "four", "five six"]
    expected = TOKENIZER.tokenize_whole(texts)
    monkeypatch.setattr(reference, "GROUP_CHARS", 12)
    found = TOKENIZER.tokenize_whole(texts)
    assert [found.ids(i).tolist() for i in range(4)] == [expected.ids(i).tolist() for i in range(4)]


def test_every_input_of_a_model_is_cut_as_its_tokens_are() -> None:
    """A value that says where its token is goes into the windows that the token goes into."""
    ids = tokenized([CLS, 1, SEP], [CLS, *range(1, 9), SEP]).inputs["input_ids"]
    places = Ragged(np.arange(len(ids.values), dtype=np.int8), ids.offsets)
    texts = TokenizedTexts({"input_ids": ids, "token_type_ids": places}, np.zeros(2, np.bool_), {})
    cut = cut_passages(texts, frame(6, 1)).sequences
    given_places, given_ids = cut.inputs["token_type_ids"], cut.inputs["input_ids"]
    assert given_places.values.dtype == np.int8
    assert given_places.lengths.tolist() == given_ids.lengths.tolist() == [3, 6, 6, 6]
    assert ids.values[given_places.values].tolist() == given_ids.values.tolist()
