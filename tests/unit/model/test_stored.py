"""A file of a model that is damaged is named, whoever reads it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vectormill.domain.errors import ModelError
from vectormill.models.model_entry import ModelEntry
from vectormill.models.model_files import ModelFiles
from vectormill.models.transformer_card import read_adapter, read_special_tokens
from worker.tokens.reference import read_vocabulary


def read_vocabulary_of(files: ModelFiles) -> object:
    (files.directory / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n")
    return read_vocabulary(files.directory)


READERS: dict[str, Callable[[ModelFiles], object]] = {
    "a/adapter_config.json": lambda files: read_adapter(files, "a"),
    "1_Dense/config.json": lambda files: files.read_dense("1_Dense", "sentence_embedding"),
    "config_sentence_transformers.json": lambda files: files.read_prompts(),
    "modules.json": lambda files: files.kinds,
    "tokenizer.json": read_special_tokens,
    "tokenizer_config.json": read_vocabulary_of,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "content",
    [b'{"torn": ', b"[1]", b"\xff", b"", b"\xef\xbb\xbf{}", b"version https://git-lfs.github.com/spec/v1\n"],
)
def test_a_damaged_file_of_a_model_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        READERS[name](ModelFiles("m", tmp_path, ModelEntry(path=str(tmp_path))))
