"""Shapes: the sizes of known models, for directories of random weights. Knows nothing of tensors.

Random weights are honest for speed: nothing in a forward pass depends on their values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vectormill.models.model_card import LAST_TOKEN, MEAN

# That of the packaged tokenizer, which all of them are given.
VOCABULARY: Final = 30_522


@dataclass(frozen=True, slots=True)
class Shape:
    """`config` goes to transformers' configuration of `model_type`. `num_tokens` is about what one pass encodes."""

    name: str
    model_type: str
    pooling: str
    max_tokens: int
    num_tokens: int
    config: Mapping[str, Any]


def bert(name: str, num_layers: int, hidden_size: int, num_heads: int, num_tokens: int) -> Shape:
    """An encoder as BERT is; its positions end at 512."""
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": 512,
    }
    return Shape(name, "bert", MEAN, 512, num_tokens, config)


def deberta(name: str, num_layers: int, hidden_size: int, num_heads: int, num_tokens: int) -> Shape:
    """An encoder as DeBERTa-v3 is: positions are relative, in buckets, and projected as the content is."""
    config = {
        **bert(name, num_layers, hidden_size, num_heads, num_tokens).config,
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
    }
    return Shape(name, "deberta-v2", MEAN, 512, num_tokens, config)


def qwen3(
    name: str, num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int, num_tokens: int
) -> Shape:
    """A decoder whose last token's vector is the text's, as the Qwen3 embedders are."""
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 4),
        "head_dim": hidden_size // num_heads,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 4096,
    }
    return Shape(name, "qwen3", LAST_TOKEN, 512, num_tokens, config)


# Tokens for some ten seconds at half the matrix rate of a large card.
SHAPES: Final[Mapping[str, Shape]] = {
    shape.name: shape
    for shape in (
        bert("bert-base", 12, 768, 12, 8_000_000),
        bert("bert-large", 24, 1024, 16, 4_000_000),
        bert("minilm", 6, 384, 12, 16_000_000),
        deberta("deberta-base", 12, 768, 12, 4_000_000),
        qwen3("qwen3-7b", 36, 4096, 12_288, 32, 400_000),
        bert("tiny", 2, 64, 2, 2_000),
        deberta("tiny-deberta", 2, 64, 2, 2_000),
        qwen3("tiny-qwen3", 2, 64, 128, 4, 2_000),
    )
}
# Measured where none is named.
GPU_SHAPES: Final = ("bert-base", "bert-large", "qwen3-7b")
