"""The texts of this benchmark: each pass has some that no pass before had, or vectors would be used again."""

from pathlib import Path
from typing import Any, Final

from benchmarks.cases.host.exact_texts import count_word_tokens, make_texts
from benchmarks.order import BenchmarkFailed
from benchmarks.texts import list_docstrings

# Around every text: [CLS] and [SEP].
NUM_SPECIAL: Final = 2
NUM_CHECKED: Final = 500


class HostTexts:
    """Draws texts of so many tokens, special ones included. `model` is the directory with the tokenizer."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        words = [word for item in list_docstrings() for word in item["text"].split()]
        self._word_tokens = count_word_tokens(words, self._count_bare)
        self._words = [word for word in words if word in self._word_tokens]
        self._num_drawn: dict[int, int] = {}

    def draw(self, num_tokens: int, num_texts: int) -> list[str]:
        """Never the same text twice. Raises BenchmarkFailed where the tokenizer counts them otherwise."""
        first = self._num_drawn.get(num_tokens, 0)
        # Some beginnings give no text, and some the text of another: the next pass begins well behind this one.
        self._num_drawn[num_tokens] = first + num_texts + num_texts // 4
        texts = make_texts(self._words, self._word_tokens, num_tokens - NUM_SPECIAL, first, num_texts)
        checked = texts[:: max(1, len(texts) // NUM_CHECKED)]
        counted = {len(each) for each in self._tokenizer.encode_batch_fast(checked)}
        if counted != {num_tokens}:
            raise BenchmarkFailed(f"Texts of {num_tokens} tokens have {sorted(counted)} by the tokenizer.")
        return texts

    def _count_bare(self, words: list[str]) -> list[int]:
        encoded: list[Any] = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        return [len(each) for each in encoded]
