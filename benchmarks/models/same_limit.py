"""One directory in which a model's every limit says the same, so that all systems cut a text at the same token."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard

SENTENCE_CONFIG: Final = "sentence_bert_config.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
# What sentence-transformers and our registry read, and what tokenizers of transformers, as in infinity, go by.
LIMITS: Final = {SENTENCE_CONFIG: "max_seq_length", TOKENIZER_CONFIG: "model_max_length"}


def copy_with_limit(card: ModelCard, target: Path, max_tokens: int | None = None) -> Path:
    """A copy of the model's directory that reads so many tokens of a text, or as many as its card says.

    Raises ModelError when the model has no positions for so many.
    """
    limit = card.max_tokens if max_tokens is None else max_tokens
    positions = _read(card.path / "config.json").get("max_position_embeddings", limit)
    if limit > positions:
        raise ModelError(f"The model {card.name!r} has {positions} positions; it cannot read {limit} tokens.")
    shutil.copytree(card.path, target, dirs_exist_ok=True)
    for name, key in LIMITS.items():
        path = target / name
        values = _read(path) if path.is_file() else {}
        path.write_text(json.dumps(values | {key: limit}), encoding="utf-8")
    return target


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values
