"""Whatever way a text's tokens are found, they are those that the Rust library gives.

`python -m tests.contract.tokenizers_made --num-texts 10000000` does the same for as many texts as one likes.
"""

from pathlib import Path

import pytest

from tests.contract.tokenizers_made import TOKENIZERS, find_differences, write_tokenizer
from worker.tokens import tokenizer as tokenizer_module
from worker.tokens.reference import Reference
from worker.tokens.splitting import CONTROL_SPACE, Splitting
from worker.tokens.tokenized import INPUT_IDS
from worker.tokens.tokenizer import Tokenizer


@pytest.mark.parametrize("name", TOKENIZERS)
def test_real_and_strange_texts_have_the_tokens_that_the_library_gives(name: str, tmp_path: Path) -> None:
    directory = write_tokenizer(name, tmp_path)
    differences = list(find_differences(directory, 20_000, seed=1))
    assert differences == []


@pytest.mark.parametrize("name", TOKENIZERS)
def test_it_is_known_of_which_tokenizers_texts_are_put_together_from_words(name: str, tmp_path: Path) -> None:
    _, is_split = TOKENIZERS[name]
    tokenizer = Tokenizer(write_tokenizer(name, tmp_path))
    assert tokenizer.way.startswith("word by word" if is_split else "whole, since this tokenizer's parts")


def test_a_tokenizer_whose_words_are_not_alone_what_they_are_in_a_text_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_tokenizer("RoBERTa", tmp_path)
    wrong = Splitting(str.split, CONTROL_SPACE)  # drops the space that belongs to its words
    monkeypatch.setattr(tokenizer_module, "find_splitting", lambda description: wrong)
    tokenizer = Tokenizer(directory)
    assert tokenizer.way.startswith("whole, since words had other tokens")
    assert "other tokens alone than in a text" in caplog.text
    texts = ["a word among words"] * 100
    assert (
        tokenizer.tokenize_whole(texts).inputs[INPUT_IDS].values.tolist()
        == Reference(directory).encode(texts).values.tolist()
    )
