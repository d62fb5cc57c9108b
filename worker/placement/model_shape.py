"""Read a model's layers, widths and tensors from its config.json and the headers of its weights.

No weights are read. If there are no weight files, the caller supplies the shapes that they would have.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.models.classifiers import is_structbert
from vectormill.models.gliner import ENCODER_PREFIX, read_gliner_config
from vectormill.models.json_files import read_object
from vectormill.models.model_card import GLINER, REXUNINLU, ModelCard
from vectormill.models.weights import find_weights, read_header

# Weights of a classifier's head (worker.model.classifiers), which vectors do not depend on.
HEAD_PARTS: Final = frozenset({"pooler", "classifier", "score"})
HEAD_FIRST_PARTS: Final = frozenset({"head", "pre_classifier"})
# Other weights that the transformer of worker.model.network does not load: other heads, and buffers.
UNUSED_PARTS: Final = frozenset({"cls", "lm_head", "qa_outputs", "predictions", "position_ids"})
UNUSED_FIRST_PARTS: Final = frozenset({"decoder"}) | {
    f"vocab_{name}" for name in ("transform", "layer_norm", "projector")
}
EMBEDDING_PARTS: Final = frozenset(
    {"embeddings", "embed_tokens", "embed_positions", "rel_embeddings", "wte", "wpe", "shared"}
)
# The first linear layers behind a GLiNER's encoder have numbers, too.
GLINER_HEAD: Final = ("span_rep_layer.", "prompt_rep_layer.")
LAYER_NUMBER: Final = re.compile(r"(?:^|\.)(\d+)\.")
# The first linear layer of a gated feed-forward block, and whether both halves are one matrix.
GATES: Final = {"gate_proj": False, "gate_up_proj": True, "up_gate_proj": True, "Wi": True}


@dataclass(frozen=True, slots=True)
class TensorSize:
    """One tensor that is loaded. `layer` is None for embeddings and for anything else outside the layers."""

    name: str
    shape: tuple[int, ...]
    layer: int | None

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def is_embedding(self) -> bool:
        return self.layer is None and bool(EMBEDDING_PARTS & set(self.name.split(".")))

    @property
    def is_matrix(self) -> bool:
        """Return True for a linear layer's weight [out, in], which weight compression compresses."""
        return len(self.shape) == 2 and not self.is_embedding


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that determine memory and arithmetic.

    `dense_values` counts the values of Dense modules or of a classifier's head, which are always fp32. An
    extractor computes relative positions in its own way (worker.tasks.extract.model).
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    is_gated: bool
    has_joined_gate: bool
    tensors: tuple[TensorSize, ...]
    dense_values: int
    model_type: str = ""
    is_extractor: bool = False

    @property
    def flop_per_token(self) -> float:
        """Return the arithmetic of all layers for a token, without that of attention between tokens.

        Without layers, a row is added to the others.
        """
        in_layers = sum(tensor.num_values for tensor in self.tensors if tensor.layer is not None)
        return 2.0 * in_layers if self.num_layers else float(self.hidden_size)

    @property
    def num_relative_positions(self) -> int:
        """Return a DeBERTa's number of relative positions in both directions; 0 for other models."""
        found = (each.shape[0] for each in self.tensors if each.name.endswith("rel_embeddings.weight"))
        return next(found, 0)


def has_weights(card: ModelCard) -> bool:
    """Return True if the model has a weight file that can be read."""
    try:
        return bool(find_weights(card.path, card.name))
    except ModelError:
        return False


def read_model_shape(card: ModelCard, shapes: Mapping[str, tuple[int, ...]] | None = None) -> ModelShape:
    """Return the sizes of a model. `shapes` are its tensors' shapes by name, if no weight file has them.

    A table of static embeddings has no layers. Raises ModelError if the model's files leave a size out.
    """
    if card.static is not None:
        rows = card.static.num_values // card.dimension
        table = TensorSize("embeddings", (rows, card.dimension), None)
        return ModelShape(0, card.dimension, 0, 0, 0, 0, False, False, (table,), 0, card.architecture)
    if card.extractor == GLINER:
        config: dict[str, Any] = dict(read_gliner_config(card.name, card.path).encoder)
    else:
        config = read_object(card.path / "config.json", card.name)
        config = config.get("text_config", config)
    hidden_size = _read_size(config, card, "hidden_size", "d_model", "dim")
    num_heads = _read_size(config, card, "num_attention_heads", "n_heads", "num_heads")
    sizes = _read_shapes(card) if shapes is None else shapes
    tensors = tuple(_list_tensors(sizes))
    gates = {part for tensor in tensors for part in tensor.name.split(".")} & set(GATES)
    return ModelShape(
        num_layers=_read_size(config, card, "num_hidden_layers", "n_layers", "num_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_key_value_heads=config.get("num_key_value_heads") or num_heads,
        head_size=config.get("head_dim") or hidden_size // num_heads,
        intermediate_size=_read_size(config, card, "intermediate_size", "hidden_dim", "d_ff", "ffn_dim"),
        is_gated=bool(gates),
        has_joined_gate=any(GATES[gate] for gate in gates),
        tensors=tensors,
        dense_values=_count_dense_values(card, sizes, hidden_size),
        model_type="bert" if is_structbert(config) else str(config.get("model_type", "")),
        is_extractor=card.extractor == REXUNINLU,
    )


def _read_shapes(card: ModelCard) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the floating-point tensors by name, of a GLiNER's encoder under its own names."""
    headers = [read_header(path) for path in find_weights(card.path, card.name)]
    return {
        name.removeprefix(ENCODER_PREFIX): tensor.shape
        for header in headers
        for name, tensor in header.items()
        if tensor.is_float
    }


def _list_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[TensorSize]:
    for name, shape in shapes.items():
        parts = name.split(".")
        if _is_of_head(name) or UNUSED_PARTS & set(parts) or parts[0] in UNUSED_FIRST_PARTS:
            continue
        number = None if name.startswith(GLINER_HEAD) else LAYER_NUMBER.search(name)
        yield TensorSize(name, shape, int(number[1]) if number else None)


def _is_of_head(name: str) -> bool:
    parts = name.split(".")
    return bool(HEAD_PARTS & set(parts)) or parts[0] in HEAD_FIRST_PARTS


def _count_dense_values(card: ModelCard, shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> int:
    """Return the number of values that follow the pooled vector."""
    if card.classifier is None:
        return sum(_count_dense(card.path / folder) for folder in card.dense)
    if card.classifier.num_words:
        return hidden_size * card.classifier.num_words
    return sum(math.prod(shape) for name, shape in shapes.items() if _is_of_head(name))


def _count_dense(folder: Path) -> int:
    """Return the number of values of a Dense module from its configuration: a matrix and maybe a bias."""
    config = read_object(folder / "config.json", folder.parent.name)
    size = int(config["in_features"]) * int(config["out_features"])
    return size + int(config["out_features"]) * bool(config.get("bias", True))


def _read_size(config: dict[str, Any], card: ModelCard, *keys: str) -> int:
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise ModelError(
        f"The config.json of model {card.name!r} has no {keys[0]}, so the model's memory cannot be predicted."
    )
