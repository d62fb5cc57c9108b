"""Texts from words: what is learned, what is not, what is forgotten, and by many threads at once."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from vectormill.models.registry import find_packaged_model
from vectormill.ragged import Ragged
from worker.tokens import word_cache
from worker.tokens.reference import Reference
from worker.tokens.splitting import CONTROL_SPACE, Splitting
from worker.tokens.word_cache import UNKNOWN, WordCache, WordTable, WordTally

MODEL = find_packaged_model()
assert MODEL is not None
REFERENCE = Reference(MODEL)
SPLITTING = Splitting(str.split, CONTROL_SPACE)
TEXTS = [f"the {number}th of many texts about trees, rivers and mountains" for number in range(200)]


class PlanRequest:
    """The library, and what it was asked for."""

    def __init__(self) -> None:
        self.prefix, self.suffix = REFERENCE.prefix, REFERENCE.suffix
        self.has_added_token = REFERENCE.has_added_token
        self.texts: list[str] = []
        self.words: list[str] = []

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> Ragged:
        (self.texts if add_special_tokens else self.words).extend(texts)
        return REFERENCE.encode(texts, add_special_tokens=add_special_tokens)


def cached() -> tuple[WordCache, PlanRequest]:
    asked = PlanRequest()
    return WordCache(asked, SPLITTING), asked  # type: ignore[arg-type]


def assert_same(found: Ragged, texts: Sequence[str]) -> None:
    expected = REFERENCE.encode(texts)
    assert found.values.dtype == np.int32
    assert found.values.tolist() == expected.values.tolist()
    assert found.offsets.tolist() == expected.offsets.tolist()


def test_the_library_is_asked_for_a_word_once() -> None:
    cache, asked = cached()
    assert_same(cache.encode(TEXTS), TEXTS)
    assert len(set(asked.words)) == len(asked.words) > 200
    asked.words.clear()
    asked.texts.clear()
    assert_same(cache.encode(TEXTS[1:]), TEXTS[1:])
    assert (asked.words, asked.texts) == ([], [])


def test_words_that_were_known_are_counted_by_all_threads_together() -> None:
    tally = WordTally()
    cache = WordCache(REFERENCE, SPLITTING, tally)
    for _ in range(2):  # the first text was mostly new itself
        cache.encode(TEXTS)
    num_words = sum(len(text.split()) for text in TEXTS)
    assert tally.num_words == 2 * num_words
    assert 0 < num_words - 100 < tally.num_known < 2 * num_words
    before = tally.num_known
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(cache.encode, [TEXTS] * 20))
    assert tally.num_known == before + 20 * num_words


def test_texts_that_may_not_be_split_or_hold_an_added_token_go_to_the_library_whole() -> None:
    cache, asked = cached()
    cache.encode(TEXTS)
    asked.texts.clear()
    whole = ["the many\x1ctexts about trees", "many [SEP] texts about rivers", "", " "]
    assert_same(cache.encode([*TEXTS, *whole, *TEXTS]), [*TEXTS, *whole, *TEXTS])
    assert asked.texts == whole


def test_words_of_a_text_that_is_mostly_new_are_not_learned() -> None:
    cache, asked = cached()
    for _ in range(2):  # the first text was mostly new itself
        cache.encode(TEXTS)
    asked.words.clear()
    strange = ["many " + "x" * 101, "漢字かな交じり文"]
    assert_same(cache.encode([*TEXTS, *strange]), [*TEXTS, *strange])
    assert asked.words == []


def test_a_few_characters_cost_the_library_less() -> None:
    cache, asked = cached()
    cache.encode(TEXTS)
    asked.texts.clear()
    assert_same(cache.encode(TEXTS[:2]), TEXTS[:2])
    assert asked.texts == TEXTS[:2]
    assert_same(cache.encode([]), [])


@pytest.mark.parametrize(("limit", "value"), [("MAX_WORDS", 40), ("MAX_CHARS", 200)])
def test_when_there_are_too_many_words_all_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(word_cache, limit, value)
    cache, asked = cached()
    assert_same(cache.encode(TEXTS), TEXTS)
    num_words = len(asked.words)
    assert_same(cache.encode(TEXTS), TEXTS)
    assert len(asked.words) == 2 * num_words


def test_many_threads_learn_and_forget_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "MAX_WORDS", 300)
    cache, _ = cached()
    start = threading.Barrier(4)

    def run(thread: int) -> list[tuple[list[str], Ragged]]:
        start.wait(30)
        some = [[text.replace("trees", f"t{thread}{turn}") for text in TEXTS] for turn in range(8)]
        return [(texts, cache.encode(texts)) for texts in some]

    with ThreadPoolExecutor(4) as threads:
        for results in threads.map(run, range(4)):
            for texts, found in results:
                assert_same(found, texts)


def test_a_table_keeps_the_numbers_of_its_words_as_it_grows() -> None:
    table = WordTable(Ragged.from_rows([np.array([7], dtype=np.int32)], np.int32))
    words = [f"word{number}" for number in range(10_000)]
    ids = Ragged.from_rows(
        [np.full(number % 5, number, dtype=np.int32) for number in range(10_000)], np.int32
    )
    table.add(words[:10], ids.part(0, 10))
    early = table.find(words[:10])
    table.add(words, ids)  # ten of them again
    assert table.find(words[:10]).tolist() == early.tolist() == list(range(1, 11))
    assert table.find(["word3", "nothing"]).tolist() == [4, UNKNOWN]
    found = table.take(table.find(words))
    assert found.values.tolist() == ids.values.tolist()
    assert found.offsets.tolist() == ids.offsets.tolist()
    assert table.take(np.zeros(1, dtype=np.int64)).values.tolist() == [7]
    assert (len(table), table.num_chars) == (10_001, sum(map(len, words)))
