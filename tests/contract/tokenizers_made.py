"""Tokenizers in the shapes that models have, trained here on little, and how ours compares with the library's."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests.contract.strange_texts import real_texts, strange_texts
from tests.models import packaged_model
from worker.tokens.reference import Reference
from worker.tokens.tokenized import INPUT_IDS
from worker.tokens.tokenizer import Tokenizer as OurTokenizer

BATCH = 1024


def _packaged(**changes: Any) -> str:
    description = json.loads((packaged_model() / "tokenizer.json").read_text())
    for part, values in changes.items():
        description[part] = {**description[part], **values}
    return json.dumps(description)


def _train(model: Any, trainer: Any, normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.train_from_iterator(real_texts()[:1500], trainer)
    return tokenizer


def _finish(tokenizer: Tokenizer) -> str:
    first, last = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", first), ("</s>", last)]
    )
    return tokenizer.to_str()


def _sentencepiece_bpe() -> str:
    """As Llama 2 and Mistral: no pre-tokenizer, spaces become a mark, and no piece goes on behind one."""
    mark = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=SPECIAL, initial_alphabet=["。", "、"])
    trained = _train(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, None, pre_tokenizers.Metaspace())
    trained.normalizer, trained.pre_tokenizer = mark, None
    description = json.loads(_finish(trained))
    description["pre_tokenizer"] = None
    return json.dumps(description)


def _with_runs_of_spaces() -> str:
    """As GPT-NeoX and ModernBERT, whose runs of spaces are added tokens."""
    tokenizer = Tokenizer.from_str(
        _byte_level(normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False))
    )
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True) for count in range(2, 25)])
    return tokenizer.to_str()


SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)]


def _with_added_words() -> str:
    tokenizer = Tokenizer.from_str(_packaged())
    tokenizer.add_tokens([AddedToken("Ǣdded", normalized=True), AddedToken("dict", single_word=True), "##a"])
    return tokenizer.to_str()


def _unigram(normalizer: Any, pre_tokenizer: Any) -> str:
    trainer = trainers.UnigramTrainer(
        vocab_size=3000, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=["。", "、"]
    )
    return _finish(_train(models.Unigram(), trainer, normalizer, pre_tokenizer))


def _byte_level(normalizer: Any, pre_tokenizer: Any) -> str:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=SPECIAL, initial_alphabet=alphabet)
    return _finish(_train(models.BPE(), trainer, normalizer, pre_tokenizer))


def _split(numbers: str) -> Any:
    """Llama 3's pattern, which is Qwen's too but for how it takes numbers."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# Name, how it is made, whether texts are put together from words.
TOKENIZERS: dict[str, tuple[Callable[[], str], bool]] = {
    "MiniLM": (_packaged, True),
    "BERT, cased": (lambda: _packaged(normalizer={"lowercase": False, "strip_accents": False}), True),
    "BERT, nothing cleaned": (
        lambda: _packaged(normalizer={"clean_text": False, "handle_chinese_chars": False}),
        True,
    ),
    "BERT with added words": (_with_added_words, True),
    "Unigram behind spaces": (  # as XLM-R, E5 and BGE-M3, whose map of characters is NFKC and little more
        lambda: _unigram(
            normalizers.NFKC(),
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        ),
        True,
    ),
    "Unigram": (
        lambda: _unigram(normalizers.NFKC(), pre_tokenizers.Metaspace()),
        True,
    ),  # as T5, but for its map
    "Unigram, first alone": (
        lambda: _unigram(normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="first")),
        True,
    ),
    "RoBERTa": (lambda: _byte_level(None, pre_tokenizers.ByteLevel(add_prefix_space=False)), True),
    "GPT-2, space before all": (
        lambda: _byte_level(None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
        True,
    ),
    "Qwen": (lambda: _byte_level(normalizers.NFC(), _split(r"\p{N}")), True),
    "Llama 3": (lambda: _byte_level(None, _split(r"\p{N}{1,3}")), True),
    "Llama 2": (_sentencepiece_bpe, False),
    "ModernBERT": (_with_runs_of_spaces, False),
    "a pattern of its own": (lambda: _byte_level(None, _split(r"\p{N}{1,2}")), False),
    "a pattern that NFKC gives spaces": (lambda: _byte_level(normalizers.NFKC(), _split(r"\p{N}")), False),
}


@cache
def make_tokenizer(name: str) -> str:
    """Return what its tokenizer.json says. Some are trained, which takes seconds."""
    make, _ = TOKENIZERS[name]
    return make()


def write_tokenizer(name: str, directory: Path) -> Path:
    (directory / "tokenizer.json").write_text(make_tokenizer(name))
    return directory


def find_differences(
    directory: Path, num_texts: int, seed: int
) -> Iterator[tuple[str, list[int], list[int]]]:
    """Texts of which our ids are others than those of the library, with both."""
    ours, reference = OurTokenizer(directory), Reference(directory)
    source = strange_texts(seed)
    for start in range(0, num_texts, BATCH):
        texts = list(islice(source, min(BATCH, num_texts - start)))
        found, expected = ours.tokenize_whole(texts).inputs[INPUT_IDS], reference.encode(texts)
        if found.values.tobytes() == expected.values.tobytes() and (found.offsets == expected.offsets).all():
            continue
        for index, text in enumerate(texts):
            if found.row(index).tolist() != expected.row(index).tolist():
                yield text, found.row(index).tolist(), expected.row(index).tolist()
