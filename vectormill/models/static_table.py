"""Read where a model of static embeddings has its table, and by which rules it reads texts. Reads no weights.

Such a model has a vector for each token of its vocabulary; the vector of a text is their mean. Two packages
write it, often both layouts at once, and the name of the table's tensor tells by whose rules it was trained:
`embeddings` is model2vec's (https://github.com/MinishLab/model2vec, 0.10), `embedding.weight` that of
StaticEmbedding of sentence-transformers (6.2).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.models.weights import read_header

MODULE: Final = "StaticEmbedding"
MODEL_TYPE: Final = "model2vec"
WEIGHTS_FILE: Final = "model.safetensors"
MODEL2VEC_TENSOR: Final = "embeddings"
MODULE_TENSOR: Final = "embedding.weight"
# The types in which such tables are stored, by safetensors' names, and numpy's.
NUMPY_TYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "<i1", "I32": "<i4", "I64": "<i8"}
DEFAULT_MAX_TOKENS: Final = 512  # model2vec's, for configurations without max_length


@dataclass(frozen=True, slots=True)
class StaticTable:
    """A table of static embeddings in `folder`, relative to the model's directory, beside its tokenizer.

    `is_model2vec` means that model2vec's rules hold: unknown tokens are left out, and a long text is cut to a
    number of characters before it is tokenized. `num_values` is the size of the table.
    """

    folder: str
    is_model2vec: bool
    num_values: int


def find_static_folder(directory: Path) -> str | None:
    """Return the folder of a static model's table, relative to its directory; None for other models."""
    modules = _read(directory / "modules.json")
    if isinstance(modules, list):
        first = min(modules, key=lambda module: int(module["idx"]), default={"type": ""})
        return str(first["path"]) if str(first["type"]).rsplit(".", 1)[-1] == MODULE else None
    config = _read(directory / "config.json")
    return "" if isinstance(config, dict) and config.get("model_type") == MODEL_TYPE else None


def read_static_table(name: str, directory: Path, folder: str) -> tuple[StaticTable, int]:
    """Return the table and the dimension of its vectors. Raise ModelError if it cannot be read."""
    path = directory / folder / WEIGHTS_FILE
    if not path.is_file():
        raise ModelError(
            f"The model {name!r} of static embeddings has no {path.name} in {path.parent}. Save it with the package "
            "that made it, which writes one; a pickle is not read without torch."
        )
    header = read_header(path)
    tensor = next((each for each in (MODEL2VEC_TENSOR, MODULE_TENSOR) if each in header), None)
    if tensor is None or len(header[tensor].shape) != 2:
        raise UnsupportedModel(
            f"The file {path} has no table {MODEL2VEC_TENSOR} or {MODULE_TENSOR} of static embeddings."
        )
    foreign = sorted({each.dtype for each in header.values()} - NUMPY_TYPES.keys())
    if foreign:
        raise UnsupportedModel(
            f"The file {path} has numbers of type {foreign[0]}; tables of {', '.join(NUMPY_TYPES)} are read."
        )
    rows, dimension = header[tensor].shape
    return StaticTable(folder, tensor == MODEL2VEC_TENSOR, rows * dimension), dimension


def find_static_limit(directory: Path, table: StaticTable, config: dict[str, Any]) -> int | None:
    """Return how many tokens of a text the authors' package reads; None for all."""
    if table.is_model2vec:
        limit = config.get("max_length", DEFAULT_MAX_TOKENS)
    else:
        tokenizer = _read(directory / table.folder / "tokenizer.json") or {}
        limit = (tokenizer.get("truncation") or {}).get("max_length")
    return None if limit is None else int(limit)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the code that needs the file reports the error
        return None
