"""Our token ids are those of transformers, whatever the length, and cutting a long text first changes nothing."""

import ast
import inspect
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vectormill.models.model_card
from vectormill.domain.errors import ModelError
from vectormill.domain.task import write_token_ids
from vectormill.jobs.item import ENCODING_FAILED, TOO_MANY_TOKENS
from vectormill.models.registry import find_packaged_model
from worker.tokens import tokenizer as tokenizer_module
from worker.tokens.reference import NUM_LARGE_GROUPS, Reference, read_vocabulary
from worker.tokens.tokenizer import Tokenizer

MODEL = find_packaged_model()
assert MODEL is not None
TOKENIZER = Tokenizer(MODEL)

CONSTANTS = [
    node.value for node in ast.walk(ast.parse(inspect.getsource(ast))) if isinstance(node, ast.Constant)
]
TEXTS = [
    *[text for text in CONSTANTS if isinstance(text, str) and text.strip()],
    inspect.getsource(vectormill.models.model_card),
    "Ünïcödé, 漢字かな交じり文, русский, العربية, 🙂🙃, a\u0301 e\u0301",
    "a [SEP] in the middle and a [MASK] too",
    "x" * 300,
    "!" * 600,
]


@pytest.fixture(scope="module")
def reference():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.mark.parametrize("max_tokens", [3, 4, 17, 128, 256, 512])
def test_ids_equal_those_of_transformers_at_every_length(reference, max_tokens: int) -> None:  # type: ignore[no-untyped-def]
    expected = reference(TEXTS, truncation=True, max_length=max_tokens)["input_ids"]
    ours = TOKENIZER.tokenize(TEXTS, max_tokens, truncate=True)
    assert len(ours) == len(TEXTS)
    for index, ids in enumerate(expected):
        assert ours.ids(index).tolist() == ids
    whole = [len(ids) for ids in reference(TEXTS)["input_ids"]]
    assert ours.truncated.tolist() == [length > max_tokens for length in whole]


@pytest.mark.parametrize(
    ("num_free_cores", "way"),
    [
        (0, "word by word"),  # the model computes on all of them: what takes least of their time
        (3, "word by word"),
        (4, "whole, because 4 cores tokenize at the same time"),
        (14, "whole, because 14 cores tokenize at the same time"),
    ],
)
def test_texts_go_whole_to_the_library_where_it_has_cores_of_its_own(num_free_cores: int, way: str) -> None:
    assert MODEL is not None
    tokenizer = Tokenizer(MODEL, num_free_cores=num_free_cores)
    assert tokenizer.way == way
    for found, expected in zip(
        (tokenizer.tokenize(TEXTS, 64, truncate=True), tokenizer.tokenize_whole(TEXTS)),
        (TOKENIZER.tokenize(TEXTS, 64, truncate=True), TOKENIZER.tokenize_whole(TEXTS)),
        strict=True,
    ):
        assert [found.ids(index).tolist() for index in range(len(TEXTS))] == [
            expected.ids(index).tolist() for index in range(len(TEXTS))
        ]
        assert found.truncated.tolist() == expected.truncated.tolist()


def test_a_text_of_exactly_max_tokens_is_not_truncated_and_does_not_fail() -> None:
    text = "one two three"  # five tokens with the special ones
    assert not TOKENIZER.tokenize([text], 5, truncate=True).truncated[0]
    assert not TOKENIZER.tokenize([text], 5, truncate=False).failures
    assert TOKENIZER.tokenize([text], 4, truncate=True).truncated[0]


def test_without_truncation_a_long_text_fails_alone_and_its_length_is_told() -> None:
    texts = TOKENIZER.tokenize(["short", "one two three four", "short"], 4, truncate=False)
    assert list(texts.failures) == [1]
    assert texts.failures[1].code == TOO_MANY_TOKENS
    assert "6 tokens; 4 are allowed" in texts.failures[1].detail
    assert texts.lengths.tolist() == [3, 0, 3]


@given(
    st.lists(
        st.sampled_from(["a", " ", "  ", "\n", "é", "\u0301", "\u200b", "漢", "word ", "[SEP]", "ﬁ", "-"])
    ).map("".join)
)
@settings(max_examples=300, deadline=None)
def test_cutting_the_characters_first_never_changes_the_first_tokens(text: str) -> None:
    whole = TOKENIZER.tokenize([text], 1 << 20, truncate=True).ids(0).tolist()
    for chars_per_token in (1, 2, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer_module, "CHARS_PER_TOKEN", chars_per_token)
            cut = TOKENIZER.tokenize([text], 5, truncate=True)
        expected = whole if len(whole) <= 5 else [*whole[:4], whole[-1]]
        assert cut.ids(0).tolist() == expected
        assert bool(cut.truncated[0]) == (len(whole) > 5)


class SlowRust:
    """The library, in which every large call lasts until it is released."""

    def __init__(self, rust: Any) -> None:
        self._rust = rust
        self.entered = threading.Semaphore(0)
        self.released = threading.Event()

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        if len(texts[0]) > 100:
            self.entered.release()
            assert self.released.wait(30)
        return self._rust.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def test_two_threads_tokenize_much_at_a_time_and_who_has_little_never_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MODEL is not None
    reference = Reference(MODEL)
    slow = SlowRust(reference.rust)
    monkeypatch.setattr(reference, "rust", slow)
    books = ["word " * 5000]
    threads = [threading.Thread(target=reference.encode, args=(books,), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all(slow.entered.acquire(timeout=30) for _ in range(NUM_LARGE_GROUPS))
    assert not slow.entered.acquire(timeout=0.1), "the memory of a third"
    assert len(reference.encode(["a query"])) == 1
    slow.released.set()
    for thread in threads:
        thread.join(30)
    assert slow.entered.acquire(timeout=0), "the others came afterwards"


def test_lower_case_is_added_where_the_tokenizer_has_none_of_its_own(tmp_path: Path) -> None:
    assert MODEL is not None
    description = json.loads((MODEL / "tokenizer.json").read_text())
    description["normalizer"]["lowercase"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    cased = Tokenizer(tmp_path).tokenize(["HELLO"], 16, truncate=True).ids(0).tolist()
    lowered = Tokenizer(tmp_path, lowercase=True).tokenize(["HELLO"], 16, truncate=True).ids(0).tolist()
    assert lowered == TOKENIZER.tokenize(["hello"], 16, truncate=True).ids(0).tolist() != cased


def test_an_unreadable_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    assert MODEL is not None
    shutil.copy(MODEL / "config.json", tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match="Cannot read the tokenizer"):
        Tokenizer(tmp_path)


def test_pairs_for_which_there_is_no_room_beside_their_special_tokens_fail_one_by_one() -> None:
    none = TOKENIZER.tokenize_pairs(["a cat", "b"], ["a dog", "c"], 4, truncate=True)
    assert {index: failure.code for index, failure in none.failures.items()} == dict.fromkeys(
        (0, 1), TOO_MANY_TOKENS
    )
    assert none.lengths.tolist() == [0, 0]
    least = TOKENIZER.tokenize_pairs(["a cat", "b"], ["a dog", "c"], 5, truncate=True)
    assert (least.lengths.tolist(), least.truncated.tolist()) == ([5, 5], [True, False])


def test_pairs_fail_one_by_one_where_a_tokenizer_joins_them_in_no_way_that_is_known(tmp_path: Path) -> None:
    assert MODEL is not None
    for name in ("config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        shutil.copy(MODEL / name, tmp_path / name)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    pair = content["post_processor"]["pair"]
    pair[1], pair[3] = pair[3], pair[1]  # the second text comes first
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    joined = tokenizer.tokenize_pairs(["a cat", "b"], ["a dog", "c"], 512, truncate=True)
    assert {index: failure.code for index, failure in joined.failures.items()} == dict.fromkeys(
        (0, 1), ENCODING_FAILED
    )
    assert "not supported" in joined.failures[0].detail
    assert len(tokenizer.tokenize_pairs([], [], 512, truncate=True)) == 0, "texts alone need no pairs"


def test_token_ids_of_a_client_that_are_too_many_are_cut_and_counted_or_fail() -> None:
    texts = [write_token_ids([2023, 2003]), write_token_ids([2023] * 9)]
    cut = TOKENIZER.take_ids(texts, "", 8, truncate=True)
    assert cut.truncated.tolist() == [False, True]
    assert cut.inputs["input_ids"].lengths.tolist() == [4, 8]
    refused = TOKENIZER.take_ids(texts, "", 8, truncate=False)
    assert [failure.code for failure in refused.failures.values()] == [TOO_MANY_TOKENS]
    assert list(refused.failures) == [1]


# A line ends with "\\n" alone: these are pieces of multilingual vocabularies, and Python would end a line at each.
STRANGE = ["\u2028", "\x85", "\x0b", "\x1c"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *STRANGE, "cat", "dog"]


def test_words_keep_their_numbers_behind_strange_line_ends(tmp_path: Path) -> None:
    for end in ("\n", "\r\n"):
        (tmp_path / "vocab.txt").write_bytes(end.join([*WORDS, ""]).encode())
        tokenizer = read_vocabulary(tmp_path)
        assert tokenizer.get_vocab_size() == len(WORDS)
        found = [WORDS[number] for number in tokenizer.encode("a cat, a dog").ids]
        assert [word for word in found if not word.startswith("[")] == ["cat", "dog"]


def test_threads_that_truncate_differently_do_not_disturb_one_another() -> None:
    def count_wrong(max_tokens: int) -> int:
        asked = [["word " * 100] * 4] * 20
        lengths = [TOKENIZER.tokenize(texts, max_tokens, truncate=True).lengths.tolist() for texts in asked]
        return sum(each != [max_tokens] * 4 for each in lengths)

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(count_wrong, (8, 16, 32, 64))) == 0
