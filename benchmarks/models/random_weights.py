"""Writes a model of random weights, of a given shape, as a directory that every system can load.

Names and shapes of the tensors are those of transformers' own model. No tensor is made but a piece of the one that is
being written, so that a model of many gigabytes needs no memory for it.
"""

import json
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.models.shapes import Shape
from vectormill.models.model_card import LAST_TOKEN

# As transformers cuts large models by default.
SHARD_BYTES: Final = 5_000_000_000
BF16_BYTES: Final = 2
# The standard deviation of BERT's initialization: activations stay finite through any number of layers.
WEIGHT_SCALE: Final = 0.02
# Random values are drawn once and used again and again: drawing seven billion would take minutes.
NUM_DRAWN: Final = 1 << 24
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")

Shapes = Mapping[str, tuple[int, ...]]


def write_random_model(shape: Shape, tokenizer: Path, target: Path) -> Path:
    """The directory, in the layout of sentence-transformers; `tokenizer` is a model's directory to take that from."""
    target.mkdir(parents=True, exist_ok=True)
    config, tensors = describe_model(shape)
    write_layout(shape, config, tokenizer, target)
    write_shards(tensors, target)
    return target


def describe_model(shape: Shape) -> tuple[dict[str, object], Shapes]:
    """config.json, and every tensor's name and shape. Allocates no weights."""
    import torch
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(shape.model_type, **shape.config)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    values = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    return values, {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


def write_layout(shape: Shape, config: Mapping[str, object], tokenizer: Path, target: Path) -> None:
    """All but the weights."""
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, target / name)
    tokenizer_config = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    mode = "lasttoken" if shape.pooling == LAST_TOKEN else "mean_tokens"
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(
            [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        )
    ]
    pooling = {
        "word_embedding_dimension": shape.config["hidden_size"],
        **dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens"), False),
        f"pooling_mode_{mode}": True,
    }
    for name, values in {
        "config.json": dict(config),
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": shape.max_tokens, "do_lower_case": False},
        "tokenizer_config.json": tokenizer_config | {"model_max_length": shape.max_tokens},
        "1_Pooling/config.json": pooling,
    }.items():
        path = target / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")
    (target / "2_Normalize").mkdir(exist_ok=True)


def write_shards(tensors: Shapes, target: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """model.safetensors, or several files and their index where one would be too large."""
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
    """Consecutive tensors of up to so many bytes together; a larger one has a shard of its own."""
    shard: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        if shard and count_bytes(shard | {name: shape}) > shard_bytes:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def write_shard(tensors: Shapes, path: Path, drawn: NDArray[np.uint16]) -> None:
    """A safetensors file in bf16: eight bytes of size, a header of JSON, and the tensors one after the other."""
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
    """A tensor's values in pieces: norms are 1 and biases 0, as in a new model; matrices are random."""
    size = int(np.prod(shape))
    if len(shape) == 1:
        value = 0.0 if name.endswith("bias") else 1.0
        yield np.full(size, to_bf16(np.array([value], dtype=np.float32))[0], dtype=np.uint16)
        return
    for start in range(0, size, len(drawn)):
        yield drawn[: min(len(drawn), size - start)]


def draw_bf16(count: int) -> NDArray[np.uint16]:
    """Normal values, the same each time."""
    values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    return to_bf16(values * np.float32(WEIGHT_SCALE))


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each float32, which is what bf16 is; the lower half is cut off."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def count_bytes(tensors: Shapes) -> int:
    return sum(BF16_BYTES * int(np.prod(shape)) for shape in tensors.values())
