"""Read the card of a model of static embeddings: where its table is, and by which rules it reads texts.

Such a model has a vector for each token of its vocabulary; the vector of a text is their mean. Two packages
write it, often both layouts at once, and the name of the table's tensor tells by whose rules it was trained:
`embeddings` is model2vec's (https://github.com/MinishLab/model2vec, 0.10), `embedding.weight` that of
StaticEmbedding of sentence-transformers (6.2).
"""

import math
from typing import Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.models.model_card import ModelCard, StaticTable, TableMissing
from vectormill.models.model_files import LARGEST_MAX_TOKENS, ModelFiles
from vectormill.models.model_shape import ModelShape, TensorSize
from vectormill.models.poolings import MEAN, parse_pooling, tell_prompts
from vectormill.models.tensor_headers import fingerprint_directory, read_header

MODULE: Final = "StaticEmbedding"
MODEL_TYPE: Final = "model2vec"
WEIGHTS_FILE: Final = "model.safetensors"
MODEL2VEC_TENSOR: Final = "embeddings"
MODULE_TENSOR: Final = "embedding.weight"
# The types in which such tables are stored, by safetensors' names, and numpy's.
NUMPY_TYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "<i1", "I32": "<i4", "I64": "<i8"}
DEFAULT_MAX_TOKENS: Final = 512  # model2vec's, for configurations without max_length


def find_static_folder(files: ModelFiles) -> str | None:
    """Return the folder of a static model's table, relative to its directory; None for other models."""
    if files.modules:
        return files.modules[0].folder if files.kinds[0] == MODULE else None
    return "" if files.read("config.json").take("model_type", "") == MODEL_TYPE else None


def read_static_card(files: ModelFiles, folder: str) -> ModelCard:
    """Return the card of a model whose table is in this folder.

    The header of the table is always read: no other file has the dimension. Its limit of tokens is a default, not a
    property. Raise ModelError if the table cannot be read.
    """
    name, entry = files.name, files.entry
    if entry.pooling is not None and parse_pooling(entry.pooling) != (MEAN,):
        raise ModelError(f"The model {name!r} has static embeddings, whose mean is the vector of a text.")
    if files.kinds[1:] not in ([], ["Normalize"]):
        raise UnsupportedModel(
            f"The model {name!r} is made of {', '.join(files.kinds)} in modules.json. Only Normalize may follow "
            f"{files.kinds[0]}."
        )
    files.require_inside(folder)
    table, dimension, num_parameters = _read_table(files, folder)
    if not (files.directory / folder / "tokenizer.json").is_file():
        raise ModelError(f"The model {name!r} has no tokenizer.json in {files.directory / folder}.")
    # How many tokens of a text the authors' package reads; None for all.
    if table.is_model2vec:
        # Null means all of a text.
        unset = LARGEST_MAX_TOKENS if "max_length" in files.config.values else DEFAULT_MAX_TOKENS
        limit = files.config.take("max_length", unset, least=1)
        normalizes = files.config.take("normalize", False)
        is_classifier = "head_config" in files.config.values
    else:
        truncation = files.read(f"{folder}/tokenizer.json".lstrip("/")).inner("truncation")
        files.expect(truncation, "direction", "Right")
        limit = truncation.take("max_length", LARGEST_MAX_TOKENS, least=1)
        normalizes = files.kinds[-1] == "Normalize"
        is_classifier = False
    if files.kinds[1:]:
        files.read_changing(files.modules[-1].folder, "sentence_embedding")
    normalize = normalizes if entry.normalize is None else entry.normalize
    similarity, notes = files.read_similarity(has_unit_length=normalize)
    prompts, default_prompt = files.read_prompts()
    weights = [files.directory / folder / WEIGHTS_FILE]
    architecture = "StaticModel" if table.is_model2vec else MODULE
    return ModelCard(
        name=name,
        path=files.directory,
        revision=entry.revision or fingerprint_directory(files.directory, weights),
        architecture=architecture,
        dimension=dimension,
        max_tokens=files.choose_max_tokens(LARGEST_MAX_TOKENS, limit),
        pooling=(MEAN,),
        normalize=normalize,
        similarity=similarity,
        prompts=prompts,
        default_prompt=default_prompt,
        num_parameters=num_parameters,
        static=table,
        shape=ModelShape(
            hidden_size=dimension,
            tensors=(TensorSize("embeddings", (table.num_values // dimension, dimension), None),),
            model_type=architecture,
        ),
        unread="a classifier's head" if is_classifier else "",
        unprompted=tell_prompts(files.called, "", prompts, default_prompt),
        notes=notes,
    )


def _read_table(files: ModelFiles, folder: str) -> tuple[StaticTable, int, int]:
    """Return the table, the dimension of its vectors, and the number of values in its file.

    Raise ModelError if it cannot be read.
    """
    path = files.directory / folder / WEIGHTS_FILE
    if not path.is_file():
        if not files.needs_weights:
            raise TableMissing(f"The table of model {files.name!r} is not here.")
        raise ModelError(
            f"The model {files.name!r} of static embeddings has no {path.name} in {path.parent}. Save it with the "
            "package that made it, which writes one; a pickle is not read without torch."
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
    num_parameters = sum(math.prod(each.shape) for each in header.values())
    return StaticTable(folder, tensor == MODEL2VEC_TENSOR, rows * dimension), dimension, num_parameters
