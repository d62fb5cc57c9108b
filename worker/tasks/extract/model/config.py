"""Read the DeBERTa configuration of a RexUniNLU model, and refuse unknown settings by name.

The published configuration could not be read when this was written, so nothing in it is skipped silently: a
name that is not listed here, or a value that would need other arithmetic, raises an error before any weight
is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.errors import ModelError
from vectormill.models.stored import read_stored

MODEL_TYPE: Final = "deberta-v2"
NUM_ADDED_TOKENS: Final = 4
ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_python", "relu", "silu", "swish", "tanh", "linear")
POSITION_TERMS: Final = frozenset({"c2p", "p2c"})
# Settings that do not affect the forward pass: about training, other heads, files, and the form of
# transformers' outputs.
WITHOUT_EFFECT: Final = frozenset({
    "_name_or_path", "add_cross_attention", "architectures", "attention_probs_dropout_prob", "bos_token_id",
    "chunk_size_feed_forward", "classifier_dropout", "cls_dropout", "dtype", "eos_token_id",
    "finetuning_task", "hidden_dropout_prob", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "label2id", "legacy", "model_type", "output_attentions", "output_hidden_states",
    "pad_token_id", "pooler_dropout", "pooler_hidden_act", "pooler_hidden_size", "problem_type",
    "return_dict", "sep_token_id", "summary_type", "task_specific_params", "tie_word_embeddings",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_cache",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class DebertaConfig:
    """The settings that the arithmetic depends on. A convolution kernel of 0 means no convolution."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    attention_head_size: int
    intermediate_size: int
    embedding_size: int
    vocab_size: int  # including the four added tokens
    type_vocab_size: int
    max_position_embeddings: int
    max_relative_positions: int  # as configured; -1 means that distances are not bucketed by logarithm
    position_buckets: int
    position_terms: frozenset[str]  # any of "c2p" and "p2c"
    position_biased_input: bool
    share_att_key: bool
    norm_rel_ebd: bool
    layer_norm_eps: float
    hidden_act: str
    conv_kernel_size: int
    conv_groups: int
    conv_act: str

    @property
    def span(self) -> int:
        """Return half the number of relative embeddings, which represent distances from -span to span - 1."""
        if self.position_buckets > 0:
            return self.position_buckets
        return (
            self.max_relative_positions if self.max_relative_positions > 0 else self.max_position_embeddings
        )

    @property
    def score_scale(self) -> float:
        """Return the factor of attention scores: 1 / sqrt(head size * number of score terms)."""
        return float((self.attention_head_size * (1 + len(self.position_terms))) ** -0.5)


def read_config(directory: Path) -> DebertaConfig:
    """Read config.json. Raises ModelError naming a setting that is missing, unknown or not supported."""
    path = directory / "config.json"
    return parse_config(read_stored(path, directory.name).values, str(path))


def parse_config(written: Mapping[str, Any], place: str) -> DebertaConfig:
    """Return the settings of a parsed config.json. Raises ModelError as read_config does."""
    given = _Given(written, place)
    given.require("model_type", MODEL_TYPE)
    given.require("relative_attention", True)
    given.require("z_steps", 0, default=0)
    hidden_size, num_heads = given.number("hidden_size"), given.number("num_attention_heads")
    terms = given.value("pos_att_type")
    norms = str(given.value("norm_rel_ebd", "none")).lower()
    config = DebertaConfig(
        hidden_size=hidden_size,
        num_hidden_layers=given.number("num_hidden_layers"),
        num_attention_heads=num_heads,
        attention_head_size=given.number("attention_head_size", hidden_size // max(1, num_heads)),
        intermediate_size=given.number("intermediate_size"),
        embedding_size=given.number("embedding_size", hidden_size),
        vocab_size=given.number("vocab_size") + NUM_ADDED_TOKENS,
        type_vocab_size=given.number("type_vocab_size", 0),
        max_position_embeddings=given.number("max_position_embeddings", 512),
        max_relative_positions=given.number("max_relative_positions", -1),
        position_buckets=given.number("position_buckets", -1),
        position_terms=frozenset(terms.split("|") if isinstance(terms, str) else terms or ()),
        position_biased_input=bool(given.value("position_biased_input", True)),
        share_att_key=bool(given.value("share_att_key", False)),
        norm_rel_ebd=norms == "layer_norm",
        layer_norm_eps=float(given.value("layer_norm_eps", 1e-7)),
        hidden_act=str(given.value("hidden_act", "gelu")),
        conv_kernel_size=given.number("conv_kernel_size", 0),
        conv_groups=given.number("conv_groups", 1),
        conv_act=str(given.value("conv_act", "tanh")),
    )
    given.refuse("norm_rel_ebd", norms not in ("none", "layer_norm"))
    given.refuse("pos_att_type", not config.position_terms <= POSITION_TERMS)
    given.refuse("attention_head_size", num_heads * config.attention_head_size != hidden_size)
    given.refuse("conv_kernel_size", config.conv_kernel_size > 0 and config.conv_kernel_size % 2 == 0)
    for name in ("hidden_act", "conv_act"):
        given.refuse(name, getattr(config, name) not in ACTIVATIONS)
    if unknown := sorted(written.keys() - given.read - WITHOUT_EFFECT):
        raise ModelError(
            f"{place}: unknown settings: {', '.join(unknown)}. They may change what the model computes; remove from "
            "the file those that have no effect on a forward pass."
        )
    return config


def tabulate_distances(config: DebertaConfig, longest: int) -> NDArray[np.int64]:
    """Return the relative embedding's index [2 * longest + 1] for each distance -longest … longest.

    Distances of half the buckets and more share them logarithmically, but only if `max_relative_positions` is
    positive as configured: unlike transformers, the reference does not replace -1 by the number of positions.
    """
    distances = np.arange(-longest, longest + 1)
    rounded = distances
    if config.position_buckets > 0 and config.max_relative_positions > 0:
        rounded = _round_logarithmically(
            distances, config.position_buckets // 2, config.max_relative_positions
        )
    return np.clip(rounded + config.span, 0, 2 * config.span - 1)


def _round_logarithmically(distances: NDArray[np.int64], middle: int, longest: int) -> NDArray[np.int64]:
    """Map distances to logarithmic buckets.

    Computed in float32, so that values near an integer round as in the reference.
    """
    magnitude = np.maximum(np.abs(distances), max(1, middle - 1))
    share = np.log((magnitude / np.float32(middle)).astype(np.float32)) / np.log(
        np.float32((longest - 1) / middle)
    )
    rounded = np.ceil(share * np.float32(middle - 1)) + middle
    near = np.abs(distances) <= middle
    return np.where(near, distances, rounded * np.sign(distances)).astype(np.int64)


class _Given:
    """A configuration that records which of its settings were read."""

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        self._config, self._place = config, place
        self.read: set[str] = set()

    def value(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        value = self._config.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.value(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self._place}: {name} must be an integer; got {value!r}.")
        return value

    def require(self, name: str, only: Any, default: Any = None) -> None:
        self.refuse(name, self.value(name, default) != only)

    def refuse(self, name: str, is_refused: bool) -> None:
        if is_refused:
            raise ModelError(f"{self._place}: {name} is {self._config.get(name)!r}, which is not supported.")
