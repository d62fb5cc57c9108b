"""Write a bge-m3 with random weights in the published layout: XLM-RoBERTa with a sparse and a multi-vector head.

Its outputs are meaningless, but their cost, their sizes and the way that they take are those of a real model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.random_extractor import Shapes, copy_tokenizer, list_blocks, list_layers, write_weights
from vectormill.models.weights import COLBERT_LINEAR, SPARSE_LINEAR


@dataclass(frozen=True, slots=True)
class EmbedderShape:
    """The sizes of a random bge-m3. Vectors of texts and of tokens have `hidden_size` numbers."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    max_tokens: int = 512


M3: Final = EmbedderShape(24, 1024, 16, 4096, max_tokens=8192)
SMALL: Final = EmbedderShape(2, 64, 4, 128)


def write_random_embedder(shape: EmbedderShape, tokenizer: Path, target: Path) -> Path:
    """Write the model to the directory `target` and return it. It is the same on every call.

    `tokenizer` is the directory of a BERT whose tokenizer files are copied.
    """
    num_ids = copy_tokenizer(tokenizer, target)
    config = {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": num_ids,
        "max_position_embeddings": shape.max_tokens + 1,  # positions begin behind the padding id, which is 0
        "type_vocab_size": 1,
        "pad_token_id": 0,
        "layer_norm_eps": 1e-5,
    }
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(parts)
    ]
    (target / "1_Pooling").mkdir(exist_ok=True)
    for name, content in (
        ("config.json", config),
        ("modules.json", modules),
        ("sentence_bert_config.json", {"max_seq_length": shape.max_tokens, "do_lower_case": False}),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}),
    ):
        (target / name).write_text(json.dumps(content), encoding="utf-8")
    write_weights(list_shapes(shape, num_ids), 0.0, target / "model.safetensors")
    for stem, num_outputs in ((SPARSE_LINEAR, 1), (COLBERT_LINEAR, shape.hidden_size)):
        linear: Shapes = {"weight": (num_outputs, shape.hidden_size), "bias": (num_outputs,)}
        write_weights(linear, 0.0, target / f"{stem}.safetensors")
    return target


def list_shapes(shape: EmbedderShape, num_ids: int) -> Shapes:
    """Return the shapes of all tensors of a bare XLM-RoBERTa."""
    size = shape.hidden_size
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (num_ids, size),
        "embeddings.position_embeddings.weight": (shape.max_tokens + 1, size),
        "embeddings.token_type_embeddings.weight": (1, size),
    }
    layers = (shape.num_layers, size, shape.intermediate_size)
    linear, norms = list_blocks("encoder.layer", layers, ("query", "key", "value"))
    return shapes | list_layers(linear, ["embeddings.LayerNorm", *norms], size)
