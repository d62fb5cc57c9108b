"""Writes a classifier of pairs with random weights, of a given shape, in transformers' layout."""

import json
import shutil
from pathlib import Path
from typing import Final

from benchmarks.models.random_weights import TOKENIZER_FILES, Shapes, write_shards
from benchmarks.models.shapes import Shape

NUM_LABELS: Final = 2


def write_random_classifier(shape: Shape, tokenizer: Path, target: Path) -> Path:
    """The directory; `tokenizer` is that of a model to take its tokenizer from."""
    target.mkdir(parents=True, exist_ok=True)
    config, tensors = describe_classifier(shape)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, target / name)
    path = target / "tokenizer_config.json"
    limit = {"model_max_length": shape.max_tokens}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | limit), encoding="utf-8")
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_shards(tensors, target)
    return target


def describe_classifier(shape: Shape) -> tuple[dict[str, object], Shapes]:
    """config.json, and every tensor's name and shape. Allocates no weights."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(shape.model_type, num_labels=NUM_LABELS, **shape.config)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    values = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    return values, {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
