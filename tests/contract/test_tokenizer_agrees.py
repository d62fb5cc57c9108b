"""Each way of tokenizing a text gives the token ids of the Rust tokenizers library."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.tokenizers_made import TOKENIZERS, find_differences, write_tokenizer
from vectormill.ragged import Ragged
from worker.tokens import tokenizer as tokenizer_module
from worker.tokens.reference import Reference
from worker.tokens.splitting import CONTROL_SPACE, Splitting
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS
from worker.tokens.tokenizer import Tokenizer

UNCUT = "a pattern of its own"  # no place is known at which a text may be cut
CUT = [name for name in TOKENIZERS if name != UNCUT]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_real_and_strange_texts_have_the_tokens_that_the_library_gives(name: str, tmp_path: Path) -> None:
    directory = write_tokenizer(name, tmp_path)
    differences = list(find_differences(directory, 2_000, seed=1))
    assert differences == []


@pytest.mark.parametrize("name", TOKENIZERS)
def test_it_is_known_of_which_tokenizers_texts_are_put_together_from_words(name: str, tmp_path: Path) -> None:
    _, is_split = TOKENIZERS[name]
    tokenizer = Tokenizer(write_tokenizer(name, tmp_path))
    assert tokenizer.way.startswith("word by word" if is_split else "whole, because this tokenizer's parts")


def test_a_tokenizer_whose_words_are_not_alone_what_they_are_in_a_text_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_tokenizer("RoBERTa", tmp_path)
    wrong = Splitting(str.split, CONTROL_SPACE)  # drops the space that belongs to its words
    monkeypatch.setattr(tokenizer_module, "find_splitting", lambda description: wrong)
    tokenizer = Tokenizer(directory)
    assert tokenizer.way.startswith("whole, because words had different tokens")
    assert "different tokens alone than in a text" in caplog.text
    texts = ["a word among words"] * 100
    assert (
        tokenizer.tokenize_whole(texts).inputs[INPUT_IDS].values.tolist()
        == Reference(directory).encode(texts).values.tolist()
    )


MAX_TOKENS = 16
PIECES = (
    *("word", "naïve", "Straße", "don't", "x=1", "1234567", "слово", "λόγος", "كلمة", "हिन्दी", "ﺔﱞﷺ", "ﬁn"),
    *(
        "漢字。",
        "東京、",
        "ひらがな。",
        "カナ。",
        "한국어",
        "ภาษาไทย",
        "🙂",
        "a\u0301",
        "\u0301",
        "\u200b",
        "\u0600",
        "¨",
    ),
    *("<mask>", "<s>", "[SEP]", "dict", "##a", "Ǣdded", "▁", "Ġ", ".", "。", "、", "-", "x" * 40),
    *(" ", "  ", "\n", "\r\n", "\t", "\u3000", "\xa0", "\x1c", "   "),
)
LONG_TEXTS = {
    "English": "the quick brown fox jumps over the lazy dog, and then it sleeps. ",
    "Russian": "съешь же ещё этих мягких французских булок, да выпей чаю. ",
    "Hindi": "यह एक लंबा पाठ है जिसमें कई शब्द हैं और वाक्य भी हैं। ",
    "Arabic": "هذا نص طويل فيه كلمات كثيرة وجمل أيضا. ",
    "Korean": "이것은 많은 단어가 있는 긴 글입니다. ",
}
UNSPACED = {
    "Chinese": "这是一个很长的文本，里面有很多字。它没有空格、也没有尽头。",
    "Japanese": "これは長い文章です。空白は無く、東京、大阪、京都の話が続く。",
}


@cache
def made(name: str) -> tuple[Tokenizer, Reference]:
    directory = write_tokenizer(name, Path(mkdtemp()))
    return Tokenizer(directory), Reference(directory)


def cut_whole(reference: Reference, text: str, max_tokens: int) -> list[int]:
    ids: list[int] = reference.rust.encode(text).ids
    num_suffix = len(reference.suffix)
    kept = max_tokens - num_suffix
    return ids if len(ids) <= max_tokens else [*ids[:kept], *ids[len(ids) - num_suffix :]]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=60), chars_per_token=st.sampled_from([1, 2, 6]))
@settings(max_examples=50, deadline=None)
def test_a_text_that_is_cut_before_it_is_tokenized_has_the_ids_of_one_that_is_cut_behind(
    name: str, pieces: list[str], chars_per_token: int
) -> None:
    tokenizer, reference = made(name)
    text = "".join(pieces)
    for max_tokens in (5, MAX_TOKENS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer_module, "CHARS_PER_TOKEN", chars_per_token)
            found = tokenizer.tokenize([text], max_tokens, truncate=True)
        assert found.ids(0).tolist() == cut_whole(reference, text, max_tokens)
        assert bool(found.truncated[0]) == (len(reference.rust.encode(text).ids) > max_tokens)


def count_given(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, texts: Sequence[str], others: Sequence[str] = ()
) -> int:
    """The characters that are tokenized for the first tokens of these texts, or of pairs."""
    given_texts: list[str] = []
    encoding: Any = tokenizer._encoding

    class Counted:
        def encode(self, texts: Sequence[str]) -> Ragged:
            given_texts.extend(texts)
            rows: Ragged = encoding.encode(texts)
            return rows

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "_encoding", Counted())
        if others:
            tokenizer.tokenize_pairs(texts, others, MAX_TOKENS, truncate=True)
        else:
            tokenizer.tokenize(texts, MAX_TOKENS, truncate=True)
    return sum(map(len, given_texts))


@pytest.mark.parametrize("name", CUT)
def test_a_hundred_times_longer_text_costs_no_more_characters_for_its_first_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, _ = made(name)
    for phrase in LONG_TEXTS.values():
        short = count_given(tokenizer, monkeypatch, [phrase * 20])
        assert count_given(tokenizer, monkeypatch, [phrase * 2000]) == short < len(phrase * 20)


@pytest.mark.parametrize("name", CUT)
def test_a_long_text_without_spaces_is_cut_before_its_stops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, _ = made(name)
    for phrase in UNSPACED.values():
        short = count_given(tokenizer, monkeypatch, [phrase * 20])
        assert count_given(tokenizer, monkeypatch, [phrase * 2000]) == short < len(phrase * 20)


def test_a_tokenizer_whose_parts_are_unknown_gets_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = LONG_TEXTS["English"] * 100
    assert count_given(made(UNCUT)[0], monkeypatch, [text]) == len(text)


def test_a_text_of_very_long_words_is_read_in_doubling_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("x" * 99 + " ") * 1000  # one token a hundred characters
    tokenizer, reference = made("MiniLM")
    found = tokenizer.tokenize([text], MAX_TOKENS, truncate=True)
    assert found.ids(0).tolist() == cut_whole(reference, text, MAX_TOKENS)
    assert count_given(tokenizer, monkeypatch, [text]) < 8 * MAX_TOKENS * 100


@pytest.mark.parametrize("name", ["MiniLM", "Unigram behind spaces", "RoBERTa", "Llama 2"])
@pytest.mark.parametrize("max_tokens", [15, 16, 17])
def test_pairs_of_long_texts_are_cut_before_they_are_tokenized_and_have_the_same_ids(
    name: str, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, _ = made(name)
    texts = [phrase * count for phrase in LONG_TEXTS.values() for count in (1, 12, 50, 51)]
    first, second = zip(*[(a, b) for a in ("a query", *texts) for b in texts], strict=True)
    found = tokenizer.tokenize_pairs(first, second, max_tokens, truncate=True)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_module, "CHARS_PER_TOKEN", 1 << 20)
        expected = tokenizer.tokenize_pairs(first, second, max_tokens, truncate=True)
    for input_name in (INPUT_IDS, TOKEN_TYPE_IDS):
        assert found.inputs[input_name].values.tolist() == expected.inputs[input_name].values.tolist()
        assert found.inputs[input_name].offsets.tolist() == expected.inputs[input_name].offsets.tolist()
    assert found.truncated.tolist() == expected.truncated.tolist()
    document = LONG_TEXTS["English"]
    short = count_given(tokenizer, monkeypatch, ["a query"], [document * 20])
    assert count_given(tokenizer, monkeypatch, ["a query"], [document * 2000]) == short < len(document * 20)
