"""Write three tiny models of random weights with the package model2vec, and its vectors of some texts.

Run it in an environment with model2vec 0.10: `python make.py`. Tests do not run it.
"""

# mypy: ignore-errors

import json
from pathlib import Path

import numpy as np
from model2vec import StaticModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
LEARNED = Path(__file__).read_text().splitlines() * 3
TEXTS = [
    "Write three tiny models of random weights",
    "with",
    "Unknown words: \u6f22\u5b57 \u304b\u306a, and known ones",
    "\u6f22\u5b57 \u304b\u306a",  # unknown to two of the tokenizers
    "tests " * 30,
    "a      b" + " " * 2000 + "the end, which is not read where characters are counted",
    "incomprehensibilities " * 12,
    "[CLS] the special tokens of a text [SEP]",
]


def train(model, trainer, normalizer, pre_tokenizer) -> Tokenizer:
    """Return a tokenizer of few words, with special tokens that static embeddings do not read."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.train_from_iterator(LEARNED, trainer)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]")
    return tokenizer


def main() -> None:
    random = np.random.default_rng(0)
    word_piece = train(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    unigram = train(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=250, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        ),
        normalizers.NFKC(),
        pre_tokenizers.Metaspace(),
    )
    byte_level = train(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
        None,
        pre_tokenizers.ByteLevel(),
    )
    sizes = [tokenizer.get_vocab_size() for tokenizer in (word_piece, unigram, byte_level)]
    made = {
        "whole": StaticModel(
            random.standard_normal((sizes[0], 16), dtype=np.float32), word_piece, normalize=True
        ),
        "half": StaticModel(
            random.standard_normal((sizes[1], 16)).astype(np.float16), unigram, normalize=False, max_length=12
        ),
        "quantized": StaticModel(
            random.integers(-127, 128, (64, 16)).astype(np.int8),
            byte_level,
            weights=random.random(sizes[2]),
            token_mapping=random.integers(0, 64, sizes[2]),
            max_length=None,
        ),
    }
    for name, model in made.items():
        model.save_pretrained(HERE / name)
        (HERE / name / "README.md").unlink()
    vectors = {name: model.encode(TEXTS).astype(float).round(7).tolist() for name, model in made.items()}
    golden = {"texts": TEXTS, "vectors": vectors}
    (HERE / "golden.json").write_text(
        json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
