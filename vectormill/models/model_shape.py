"""The shape of a model: its layers, widths and tensors, as plans need them. Reads no file."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

# Weights of a classifier's head (worker.model.heads), which vectors do not depend on.
HEAD_PARTS: Final = frozenset({"pooler", "classifier", "score"})
HEAD_FIRST_PARTS: Final = frozenset({"head", "pre_classifier"})
# Other weights that the transformer of worker.model.network does not load: other heads, and buffers.
UNUSED_PARTS: Final = frozenset({"cls", "lm_head", "qa_outputs", "predictions", "position_ids"})
UNUSED_FIRST_PARTS: Final = frozenset({"decoder"}) | {
    f"vocab_{name}" for name in ("transform", "layer_norm", "projector")
}
EMBEDDING_PARTS: Final = frozenset(
    {
        "embeddings", "embed_tokens", "embed_positions", "rel_embeddings", "relative_attention_bias", "wte", "wpe",
        "shared",
    }
)  # fmt: skip
# The first linear layers behind a GLiNER's encoder have numbers, too.
GLINER_HEAD: Final = ("span_rep_layer.", "prompt_rep_layer.")
LAYER_NUMBER: Final = re.compile(r"(?:^|\.)(\d+)\.")
# The first linear layer of a gated feed-forward block, and whether both halves are one matrix.
GATES: Final = {"gate_proj": False, "gate_up_proj": True, "up_gate_proj": True, "Wi": True, "wi_0": False}


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
        return self.layer is None and self._is_table

    @property
    def is_matrix(self) -> bool:
        """Return True for a linear layer's weight [out, in], which weight compression compresses."""
        return len(self.shape) == 2 and not self._is_table

    @property
    def _is_table(self) -> bool:
        return bool(EMBEDDING_PARTS & set(self.name.split(".")))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that determine memory and arithmetic; 0 where the model's files leave one out.

    `dense_values` counts the values of Dense modules, of a classifier's head or of a sparse one, which are always fp32,
    and `head_values` those of a head for the vectors of tokens. If it `weighs_words`, the head of its language model
    gives each token a number for each word. An extractor computes relative positions in its own way
    (worker.tasks.extract.model). If it `sees_later`, a token attends to those behind it; if it `has_window`, some
    layers attend to near tokens only; texts are padded to a multiple of `block_tokens`, if it is not 0. `activation`
    names the function between the matrices of the feed-forward block.
    """

    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    num_key_value_heads: int = 0
    head_size: int = 0
    intermediate_size: int = 0
    is_gated: bool = False
    has_joined_gate: bool = False
    tensors: tuple[TensorSize, ...] = ()
    dense_values: int = 0
    head_values: int = 0
    weighs_words: bool = False
    model_type: str = ""
    is_extractor: bool = False
    vocab_size: int = 0
    sees_later: bool = True
    has_window: bool = False
    block_tokens: int = 0
    activation: str = ""

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

    def fill(self, shapes: Mapping[str, tuple[int, ...]], *, has_head: bool) -> "ModelShape":
        """Return it with tensors of these shapes by name, those of a classifier's head among them if it `has_head`."""
        tensors = []
        for name, size in shapes.items():
            parts = name.split(".")
            if not (_is_of_head(name) or UNUSED_PARTS & set(parts) or parts[0] in UNUSED_FIRST_PARTS):
                number = None if name.startswith(GLINER_HEAD) else LAYER_NUMBER.search(name)
                tensors.append(TensorSize(name, size, int(number[1]) if number else None))
        gates = {part for tensor in tensors for part in tensor.name.split(".")} & set(GATES)
        head = sum(math.prod(shape) for name, shape in shapes.items() if _is_of_head(name))
        return replace(
            self,
            is_gated=bool(gates),
            has_joined_gate=any(GATES[gate] for gate in gates),
            tensors=tuple(tensors),
            dense_values=head if has_head else self.dense_values,
        )


def _is_of_head(name: str) -> bool:
    parts = name.split(".")
    return bool(HEAD_PARTS & set(parts)) or parts[0] in HEAD_FIRST_PARTS
