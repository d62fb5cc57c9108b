"""Model directories: random weights in the shapes of known models, copies with one limit, and costs.

Random weights are honest for speed: no part of a forward pass depends on their values. Tensors are written in
pieces, so that writing a model of many gigabytes needs little memory.
"""

import hashlib
import json
import math
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import HOME
from vectormill.corpus import read_docstrings
from vectormill.domain.errors import ModelError
from vectormill.models.families import find_family
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import ModelCard
from vectormill.models.poolings import LAST_TOKEN, MEAN
from vectormill.models.registry import DEFAULT_MODEL, Registry, find_packaged_model
from vectormill.models.weights import find_weights
from worker.tokens.tokenizer import Tokenizer

# The vocabulary size of the packaged tokenizer, which all these models use.
VOCABULARY: Final = 30_522
SHARD_BYTES: Final = 5_000_000_000
BF16_BYTES: Final = 2
# The standard deviation of BERT's initialization keeps activations finite through any number of layers.
WEIGHT_SCALE: Final = 0.02
# This many random values are drawn once and reused: drawing seven billion would take minutes.
NUM_DRAWN: Final = 1 << 24
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
# These tensors are looked up, or not used for the vector, so they take part in no multiplication.
NOT_MULTIPLIED: Final = ("embeddings", "embed_tokens", "pooler")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a model with random weights.

    `config` is passed to transformers' configuration class of `model_type`. One pass encodes about
    `num_tokens`.
    """

    name: str
    model_type: str
    pooling: str
    max_tokens: int
    num_tokens: int
    config: Mapping[str, Any]


def bert(name: str, num_layers: int, hidden_size: int, num_heads: int, num_tokens: int) -> Shape:
    """Return the shape of an encoder like BERT, with 512 positions."""
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
    """Return the shape of an encoder like DeBERTa-v3.

    Its relative positions are in buckets and share the projections of the content.
    """
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


def xlm_roberta(name: str, num_layers: int, hidden_size: int, num_heads: int, num_tokens: int) -> Shape:
    """Return the shape of an encoder like BGE-M3, which counts positions from behind its padding token."""
    config = {
        **bert(name, num_layers, hidden_size, num_heads, num_tokens).config,
        "max_position_embeddings": 8194,
        "pad_token_id": 1,
        "type_vocab_size": 1,
    }
    return Shape(name, "xlm-roberta", MEAN, 512, num_tokens, config)


def qwen3(
    name: str,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_tokens: int,
    num_key_value_heads: int = 0,
    head_dim: int = 0,
) -> Shape:
    """Return the shape of a decoder like the Qwen3 embedders: the last token's vector is the text's.

    By default heads of keys and values are a quarter of the others, and all heads have the hidden size together.
    """
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads or max(1, num_heads // 4),
        "head_dim": head_dim or hidden_size // num_heads,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 4096,
    }
    return Shape(name, "qwen3", LAST_TOKEN, 512, num_tokens, config)


# The last number of a shape is the tokens for some ten seconds at half the matrix rate of a large card.
SHAPES: Final[Mapping[str, Shape]] = {
    shape.name: shape
    for shape in (
        bert("bert-base", 12, 768, 12, 8_000_000),
        bert("bert-large", 24, 1024, 16, 4_000_000),
        bert("minilm", 6, 384, 12, 16_000_000),
        deberta("deberta-base", 12, 768, 12, 4_000_000),
        qwen3("qwen3-7b", 36, 4096, 12_288, 32, 400_000),
        xlm_roberta("bge-m3", 24, 1024, 16, 4_000_000),
        qwen3("qwen3-0.6b", 28, 1024, 3072, 16, 4_000_000, 8, 128),
        # A third of Qwen3-8B's layers: a layer costs the same, and the weights are read in a third of the time.
        qwen3("qwen3-8b-third", 12, 4096, 12_288, 32, 1_200_000),
        bert("tiny", 2, 64, 2, 2_000),
        deberta("tiny-deberta", 2, 64, 2, 2_000),
        qwen3("tiny-qwen3", 2, 64, 128, 4, 2_000),
    )
}


def find_random(name: str) -> ModelCard:
    """Return the model of this shape with random weights; it is written once and kept beside the code."""
    directory = HOME / "random" / f"{name}-{hashlib.md5(repr(SHAPES[name]).encode()).hexdigest()[:8]}"
    if not (directory / ".written").is_file():  # missing, or left incomplete
        write_random_model(SHAPES[name], directory)
        (directory / ".written").touch()
    return read_model_card(name, directory)


def find_packaged() -> ModelCard:
    """Return the card of the packaged model, with its weights."""
    return Registry({}).card(DEFAULT_MODEL, weights=True)


def write_random_model(shape: Shape, target: Path, num_labels: int = 0) -> ModelCard:
    """Write random weights in the layout of sentence-transformers and return the model's card.

    With `num_labels` the model is a classifier of texts and pairs.
    """
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        shape.model_type, **shape.config, **({"num_labels": num_labels} if num_labels else {})
    )
    with torch.device("meta"):
        model = (AutoModelForSequenceClassification if num_labels else AutoModel).from_config(config)
    values = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    write_layout(shape, values, target, is_classifier=bool(num_labels))
    write_shards({name: tuple(tensor.shape) for name, tensor in model.named_parameters()}, target)
    return read_model_card(target.name, target)


def write_layout(shape: Shape, config: Mapping[str, object], target: Path, *, is_classifier: bool) -> None:
    """Write all files of a model but its weights.

    The tokenizer is that of the packaged model. Where it is not installed, since with its weights it is too
    large to be carried to another machine, one of the same kind is learned from docstrings.
    """
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = find_packaged_model()
    if tokenizer is None:
        train_tokenizer(target)
    else:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, target / name)
    tokenizer_config = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    files: dict[str, object] = {
        "config.json": dict(config),
        "tokenizer_config.json": tokenizer_config | {"model_max_length": shape.max_tokens},
    }
    if not is_classifier:
        mode = "lasttoken" if shape.pooling == LAST_TOKEN else "mean_tokens"
        places = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        files |= {
            "modules.json": [
                {
                    "idx": number,
                    "name": str(number),
                    "path": path,
                    "type": f"sentence_transformers.models.{kind}",
                }
                for number, (path, kind) in enumerate(places)
            ],
            "sentence_bert_config.json": {"max_seq_length": shape.max_tokens, "do_lower_case": False},
            "1_Pooling/config.json": {
                "word_embedding_dimension": shape.config["hidden_size"],
                **dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens"), False),
                f"pooling_mode_{mode}": True,
            },
        }
        (target / "2_Normalize").mkdir(exist_ok=True)
    for name, values in files.items():
        path = target / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")


def train_tokenizer(target: Path) -> None:
    """Learn a tokenizer like BERT's from the docstrings of the standard library, in some seconds."""
    from tokenizers import BertWordPieceTokenizer

    learner = BertWordPieceTokenizer()
    texts = (each.text for each in read_docstrings())
    learner.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    learner.save_model(str(target))
    # With its vocabulary it also knows the special tokens, and puts them around a text.
    BertWordPieceTokenizer(str(target / "vocab.txt")).save(str(target / "tokenizer.json"))
    values = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (target / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")


def write_shards(tensors: Shapes, target: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the weights as model.safetensors, or as shards with an index if one file would be too large."""
    shards = list(plan_shards(tensors, shard_bytes))
    drawn = draw_bf16(NUM_DRAWN if count_bytes(tensors) > BF16_BYTES * NUM_DRAWN else 1 << 16)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        write_shard(shard, target / name, drawn)
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": count_bytes(tensors)}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def plan_shards(tensors: Shapes, shard_bytes: int) -> Iterator[Shapes]:
    """Yield consecutive tensors of up to `shard_bytes` together; a larger tensor gets its own shard."""
    shard: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        if shard and count_bytes(shard | {name: shape}) > shard_bytes:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def write_shard(tensors: Shapes, path: Path, drawn: NDArray[np.uint16]) -> None:
    """Write a safetensors file in bf16: eight bytes of size, a JSON header, then the tensors in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        end = offset + BF16_BYTES * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        for name, shape in tensors.items():
            for part in fill(name, shape, drawn):
                file.write(part.tobytes())


def fill(name: str, shape: Sequence[int], drawn: NDArray[np.uint16]) -> Iterator[NDArray[np.uint16]]:
    """Yield a tensor's values in pieces: norms are 1 and biases 0, as in a new model; matrices are random."""
    size = int(np.prod(shape))
    if len(shape) == 1:
        value = 0.0 if name.endswith("bias") else 1.0
        yield np.full(size, to_bf16(np.array([value], dtype=np.float32))[0], dtype=np.uint16)
        return
    for start in range(0, size, len(drawn)):
        yield drawn[: min(len(drawn), size - start)]


def draw_bf16(count: int) -> NDArray[np.uint16]:
    """Return `count` normally distributed values as bf16 bits, from a fixed seed."""
    values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    return to_bf16(values * np.float32(WEIGHT_SCALE))


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bf16 bits of float32 values: the upper half of each, the lower half is cut off."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def count_bytes(tensors: Shapes) -> int:
    return sum(BF16_BYTES * int(np.prod(shape)) for shape in tensors.values())


def copy_with_limit(card: ModelCard, target: Path, max_tokens: int | None = None) -> ModelCard:
    """Copy a model with one token limit in all its files, so that all systems cut texts alike.

    Raise ModelError when the model has fewer positions.
    """
    limit = card.max_tokens if max_tokens is None else max_tokens
    positions = json.loads((card.path / "config.json").read_text("utf-8")).get(
        "max_position_embeddings", limit
    )
    if limit > positions:
        raise ModelError(f"The model {card.name!r} has {positions} positions; it cannot read {limit} tokens.")
    shutil.copytree(card.path, target, dirs_exist_ok=True)
    limits = {"sentence_bert_config.json": "max_seq_length", "tokenizer_config.json": "model_max_length"}
    for name, key in limits.items():
        path = target / name
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.write_text(json.dumps(values | {key: limit}), encoding="utf-8")
    return read_model_card(card.name, target)


def count_tokens(card: ModelCard, texts: Sequence[str]) -> NDArray[np.int64]:
    """Return the token count of each text, cut at the model's limit.

    All rates use this count, so they compare.
    """
    tokenizer = Tokenizer(card.path, lowercase=card.lowercase)
    return tokenizer.tokenize(texts, card.max_tokens, truncate=True).lengths


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The numbers of a transformer that decide how many operations a forward pass takes."""

    num_layers: int
    attention_size: (
        int  # the heads' dimensions in sum, which some decoders have more of than of hidden states
    )
    is_causal: bool
    num_multiplied_parameters: int

    @classmethod
    def of(cls, card: ModelCard) -> Self:
        """Read the cost from a model's config.json and the headers of its weights."""
        config = json.loads((card.path / "config.json").read_text(encoding="utf-8"))
        shapes = [shape for path in find_weights(card.path, card.name) for shape in read_shapes(path).items()]
        num_heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            attention_size=num_heads * (config.get("head_dim") or config["hidden_size"] // num_heads),
            is_causal=find_family(config["model_type"]).is_causal and config.get("is_causal", True),
            num_multiplied_parameters=sum(
                math.prod(shape)
                for name, shape in shapes
                if len(shape) == 2 and not any(part in name for part in NOT_MULTIPLIED)
            ),
        )

    def count_flop(self, lengths: NDArray[np.int64]) -> float:
        """Return the floating-point operations for texts of these lengths in tokens, padding not counted.

        Each token takes 2 operations for every multiplied parameter, and in attention 4 · layers · attended
        tokens · attention size: scores and their weighted sum, each a product of two operations. A causal
        model attends to half of a text on average. Source: Kaplan et al., Scaling Laws, section 2.1.
        """
        lengths = lengths.astype(np.float64)
        dense = 2.0 * self.num_multiplied_parameters * lengths.sum()
        attended = np.square(lengths).sum() / (2 if self.is_causal else 1)
        return float(dense + 4.0 * self.num_layers * self.attention_size * attended)


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Read tensor name -> shape from a safetensors header: its size in eight bytes, then JSON."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
