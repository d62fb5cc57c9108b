"""Small transformers of random weights with a tokenizer of a few hundred tokens, which are saved in milliseconds."""

import string
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.contract.strange_texts import real_texts

WINDOW: Final = 40
HIDDEN_SIZE: Final = 32
SPECIAL: Final = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
    "bos_token": "[CLS]", "eos_token": "[SEP]",
}  # fmt: skip
# A word, some, punctuation and capital letters, unknown characters, and texts that are longer than any window.
TEXTS: Final = (
    "short",
    "Return the SUM of a 'start' value, and an Iterable of numbers!",
    "What? Nothing; (really) nothing - or so it seems... but: who knows!",
    "漢字かな Ünïcödé",
    " ".join(f"{word} {number}" for number, word in enumerate(real_texts()[0].split() * 9))[:900],
    "the end is what matters here, " * 30 + "Or is it the Beginning?",
)
PAIRS: Final = tuple(zip(TEXTS, TEXTS[::-1], strict=True))


@cache
def make_vocabulary() -> tuple[str, ...]:
    """Return some words, and all letters, so that few words are unknown."""
    words = sorted(
        {word.lower().strip(string.punctuation) for text in real_texts()[:60] for word in text.split()}
    )
    letters = [*string.ascii_letters, *string.digits]
    pieces = [*letters, *(f"##{letter}" for letter in letters), *string.punctuation]
    named = [word for word in words if word.isascii() and word.isalpha() and len(word) > 1]
    return (*dict.fromkeys([*SPECIAL.values(), "[unused0]", "[unused1]", *pieces, *named[:200]]),)


def make_tokenizer(**changes: Any) -> Any:
    """Return a tokenizer as transformers saves it: BERT's, which tells capital letters from others."""
    vocabulary = {token: number for number, token in enumerate(make_vocabulary())}
    rust = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    named = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rust, **{**SPECIAL, **named, **changes})


def write_transformer(directory: Path, kind: str = "BertModel", tokenizer: Any = None, **sizes: Any) -> Path:
    """Write a transformer of random weights, ten times larger than a fresh one's, so that every setting is seen."""
    vocabulary = make_vocabulary()
    cls = getattr(transformers, kind)
    config = cls.config_class(
        **{
            "vocab_size": len(vocabulary),
            "hidden_size": HIDDEN_SIZE,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": WINDOW,
            "pad_token_id": 0,
            **sizes,
        }
    )
    torch.manual_seed(0)
    model = cls(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.25 if parameter.ndim > 1 else 0.1)
        if "norm" in name.lower() and name.endswith("weight"):
            parameter.data += 1
    model.save_pretrained(directory)
    (make_tokenizer() if tokenizer is None else tokenizer).save_pretrained(directory)
    return directory
