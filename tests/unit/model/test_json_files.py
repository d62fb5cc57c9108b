"""A file of a model that is damaged is named, whoever reads it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vectormill.domain.errors import ModelError
from vectormill.models.adapters import read_adapter
from vectormill.models.classifiers import read_classifier
from vectormill.models.special_tokens import read_special_tokens
from worker.model.network import Dense
from worker.tokens.reference import read_vocabulary


def read_vocabulary_of(directory: Path) -> object:
    (directory / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n")
    return read_vocabulary(directory)


STRUCTBERT_CONFIG = {"base_model_prefix": "encoder"}
BERT_CONFIG = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
READERS: dict[str, Callable[[Path], object]] = {
    "adapter_config.json": lambda directory: read_adapter("m", directory.parent, directory.name),
    "config.json": Dense,
    "config_sentence_transformers.json": lambda directory: read_classifier("m", directory, BERT_CONFIG),
    "label_mapping.json": lambda directory: read_classifier("m", directory, STRUCTBERT_CONFIG),
    "tokenizer.json": lambda directory: read_special_tokens("m", directory),
    "tokenizer_config.json": read_vocabulary_of,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", [b'{"torn": ', b"[1]", b"\xff"])
def test_a_damaged_file_of_a_model_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        READERS[name](tmp_path)
