"""A BERT's tokenizer from its vocabulary alone, for models older than tokenizer.json."""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from vectormill.domain.errors import ModelError

SPECIAL: Final = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "pad_token": "[PAD]",
}


def read_vocabulary(directory: Path) -> Tokenizer:
    """Return the tokenizer that transformers makes of `vocab.txt` and `tokenizer_config.json`. Raises ModelError."""
    path = directory / "vocab.txt"
    # Not splitlines: pieces of multilingual vocabularies are characters at which that would end a line.
    words = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocabulary = {word: number for number, word in enumerate(words)}
    missing = [
        token
        for token in (SPECIAL["unk_token"], SPECIAL["cls_token"], SPECIAL["sep_token"])
        if token not in vocabulary
    ]
    if missing:
        raise ModelError(f"The vocabulary {path} has no {' or '.join(missing)}; it is not a BERT's.")
    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token=SPECIAL["unk_token"], max_input_chars_per_word=100))
    tokenizer.add_special_tokens([token for token in SPECIAL.values() if token in vocabulary])
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, last = SPECIAL["cls_token"], SPECIAL["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])],
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
