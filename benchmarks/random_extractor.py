"""Write a RexUniNLU model with random weights in the published layout, for benchmarks and tests.

Its records are meaningless. The cost of a forward pass does not depend on the weights, but the number of
records does: random logits are above 0 as often as below, and a model that accepts half of all spans would
spend its time on them. An offset in the slowest pair of the head's rotation lowers all logits until few are
positive.
"""

import json
import math
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SEED: Final = 20_261_123
WEIGHT_SCALE: Final = 0.02
ROTARY_BASE: Final = 10_000.0
NUM_BUCKETS: Final = 256
KERNEL: Final = 3
# The special tokens of the task's prompts, which the published model has after its vocabulary.
NUM_ADDED_TOKENS: Final = 4
VALUE_BYTES: Final = 4
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ExtractorShape:
    """The sizes of a random extractor. About `offset`, found by trying, is subtracted from every logit."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    offset: float


BASE: Final = ExtractorShape(12, 768, 12, 3072, offset=10.0)
TINY: Final = ExtractorShape(2, 64, 2, 128, offset=0.33)


def write_random_extractor(shape: ExtractorShape, tokenizer: Path, target: Path) -> Path:
    """Write the model to the directory `target` and return it.

    `tokenizer` is the directory of a model whose tokenizer files are copied.
    """
    num_ids = copy_tokenizer(tokenizer, target)
    config = make_config(shape, num_ids)
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_weights(list_shapes(shape, num_ids + NUM_ADDED_TOKENS), shape.offset, target / "model.safetensors")
    return target


def copy_tokenizer(tokenizer: Path, target: Path) -> int:
    """Copy a tokenizer's files from one directory to another, which is made, and return the number of its ids."""
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, target / name)
    return len(json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])


def make_config(shape: ExtractorShape, num_ids: int) -> dict[str, Any]:
    """Return the configuration of the Chinese DeBERTa-v2: with relative positions and a convolution."""
    return {
        "model_type": "deberta-v2",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": num_ids,
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": NUM_BUCKETS,
        "max_relative_positions": -1,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "conv_kernel_size": KERNEL,
        "conv_act": "gelu",
        "layer_norm_eps": 1e-7,
        "hidden_act": "gelu",
    }


def list_layers(linear: Shapes, norms: Sequence[str], size: int) -> Shapes:
    """Return the shapes of the weights and biases of linear layers, by name, and of layer norms of this size."""
    shapes: Shapes = {}
    for name, sides in linear.items():
        shapes |= {f"{name}.weight": sides, f"{name}.bias": sides[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    return shapes


def list_blocks(
    prefix: str, sizes: tuple[int, int, int], projections: Sequence[str]
) -> tuple[Shapes, list[str]]:
    """Return the linear layers, and the names of the layer norms, of blocks in the layout of BERT.

    `sizes` are their number, the hidden size and the intermediate size.
    """
    num_blocks, size, wide = sizes
    linear: Shapes = {}
    norms = []
    for block in (f"{prefix}.{number}" for number in range(num_blocks)):
        linear |= {f"{block}.attention.self.{name}": (size, size) for name in projections}
        linear[f"{block}.attention.output.dense"] = (size, size)
        linear[f"{block}.intermediate.dense"] = (wide, size)
        linear[f"{block}.output.dense"] = (size, wide)
        norms += [f"{block}.attention.output.LayerNorm", f"{block}.output.LayerNorm"]
    return linear, norms


def list_shapes(shape: ExtractorShape, num_rows: int) -> Shapes:
    """Return the shapes of all tensors of the published layout; `num_rows` is the vocabulary size."""
    size = shape.hidden_size
    shapes: Shapes = {"plm.embeddings.word_embeddings.weight": (num_rows, size)}
    heads: Shapes = {"ffnq": (size, size), "ffnk": (size, size)}
    norms = ["plm.embeddings.LayerNorm", "plm.encoder.LayerNorm", "plm.encoder.conv.LayerNorm"]
    layers = (shape.num_layers, size, shape.intermediate_size)
    linear, inner = list_blocks("plm.encoder.layer", layers, ("query_proj", "key_proj", "value_proj"))
    shapes |= list_layers(heads | linear, norms + inner, size)
    shapes["plm.encoder.rel_embeddings.weight"] = (2 * NUM_BUCKETS, size)
    shapes |= {"plm.encoder.conv.conv.weight": (size, size, KERNEL), "plm.encoder.conv.conv.bias": (size,)}
    shapes["rotary_emb.freqs"] = (size // 2,)
    return shapes


def write_weights(shapes: Shapes, offset: float, path: Path) -> None:
    """Write a safetensors file: eight bytes of size, a JSON header, and the tensors in order."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + VALUE_BYTES * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        for values in fill(shapes, offset):
            file.write(values.astype("<f4").tobytes())


def fill(shapes: Shapes, offset: float) -> Iterator[NDArray[np.float32]]:
    """Yield the values of each tensor, the same on every call.

    Norms are 1, biases 0 except in the last pair, and matrices normally distributed.
    """
    random = np.random.default_rng(SEED)
    for name, shape in shapes.items():
        if name == "rotary_emb.freqs":
            yield (ROTARY_BASE ** (-np.arange(shape[0]) / shape[0])).astype(np.float32)
        elif len(shape) == 1:
            values = np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
            if name in ("ffnq.bias", "ffnk.bias"):
                values[-2] = math.sqrt(offset) * (1 if name == "ffnq.bias" else -1)
            yield values
        else:
            yield random.standard_normal(shape, dtype=np.float32) * np.float32(WEIGHT_SCALE)
