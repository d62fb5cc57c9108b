"""A tokenizer of a vocabulary alone has the ids that transformers gives."""

from pathlib import Path

from worker.tokens.reference import read_vocabulary

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
