"""Tiny: a real model of two layers and 32 numbers, texts for it, and the vector that each of them must get.

Loaded and run in an instant, so that a test of what goes wrong around the model does not wait for the model.
"""

import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vectormill.files.ndjson import ItemJson

MODEL = "tiny"
NUM_TEXTS = 3000
_WORDS_PER_TEXT = 12
# float16 in a collection, and another order of summation in another batch: below 1e-3 for numbers below 1.
TOLERANCE = 2e-3
_BATCH = 100


def write_tiny(directory: Path) -> dict[str, str]:
    """Writes the model; the settings with which every process knows it, and each of two workers has a thread."""
    from tests.models import write_transformer  # only here: it brings torch

    return make_environment(directory, {MODEL: write_transformer(directory / "tiny-model", "Bert")})


def make_environment(directory: Path, models: Mapping[str, Path]) -> dict[str, str]:
    """The settings with which every process knows these models."""
    return {
        "VECTORMILL_MODELS": json.dumps({name: {"path": str(path)} for name, path in models.items()}),
        "VECTORMILL_CACHE_DIR": str(directory / "cache"),
        "VECTORMILL_WORKER_DEVICES": "cpu:0,cpu:1",
        # The other backend converts the model first, for which a worker that is killed at once never has the time.
        "VECTORMILL_WORKER_BACKEND": "torch",
        "VECTORMILL_WORKER_PRECISION": "fp32",
        "VECTORMILL_WORKER_THREADS": "1",
        # Or the second job would not reach the model: its texts are those of the first.
        "VECTORMILL_WORKER_REUSE_BYTES": "0",
    }


@cache
def texts() -> list[str]:
    """Short texts, no two alike, the same on every machine."""
    words = random.Random(12)
    lexicon = _lexicon()
    return [" ".join(words.choices(lexicon, k=_WORDS_PER_TEXT)) for _ in range(NUM_TEXTS)]


def _lexicon() -> list[str]:
    from tests.models import packaged_model

    vocabulary = json.loads((packaged_model() / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(word for word in vocabulary if word.isalpha() and word.isascii() and len(word) > 3)


def items(numbers: list[int], keys: list[str] | None = None) -> list[ItemJson]:
    """The texts of these numbers, under keys that tell them unless others are given."""
    return [
        {"key": keys[position] if keys else f"k{number}", "text": texts()[number]}
        for position, number in enumerate(numbers)
    ]


@cache
def expected(directory: Path) -> NDArray[np.float32]:
    """What transformers itself makes of the texts: mean of the last layer, of unit length. float32 [texts, 32]."""
    import torch
    import transformers

    model = transformers.BertModel.from_pretrained(directory / "tiny-model").eval()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tiny-model" / "tokenizer.json"), pad_token="[PAD]"
    )
    rows = []
    with torch.inference_mode():
        for start in range(0, NUM_TEXTS, _BATCH):
            batch = tokenizer(texts()[start : start + _BATCH], padding=True, truncation=True, max_length=64)
            ids = torch.tensor(batch["input_ids"])
            mask = torch.tensor(batch["attention_mask"])
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            rows.append(torch.nn.functional.normalize(pooled, dim=1).numpy())
    vectors: NDArray[np.float32] = np.concatenate(rows).astype(np.float32)
    return vectors


def wrong_vectors(directory: Path, numbers: list[int], found: NDArray[np.float32]) -> list[tuple[int, float]]:
    """The texts whose vector is not theirs, with the largest difference of a component."""
    difference = np.abs(expected(directory)[numbers] - found).max(axis=1)
    return [
        (number, float(far)) for number, far in zip(numbers, difference, strict=True) if not far < TOLERANCE
    ]
