"""Tiny: a real model of two layers and 32 dimensions, texts for it, and the expected vector of each text.

The model loads and runs in an instant, so that tests of failures around the model do not wait for it.
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
# A collection stores float16, and another batch sums in another order: both differ by less than 1e-3 for
# numbers below 1.
TOLERANCE = 2e-3
_BATCH = 100


def write_tiny(directory: Path) -> dict[str, str]:
    """Write the model; return the settings for every process, with two workers of one thread each."""
    from tests.models import write_transformer  # imported here because the module brings torch

    return make_environment(directory, {MODEL: write_transformer(directory / "tiny-model", "Bert")})


def make_environment(directory: Path, models: Mapping[str, Path]) -> dict[str, str]:
    """Return the settings that make these models known to every process."""
    return {
        "VECTORMILL_MODELS": json.dumps({name: {"path": str(path)} for name, path in models.items()}),
        "VECTORMILL_CACHE_DIR": str(directory / "cache"),
        "VECTORMILL_WORKER_DEVICES": "cpu:0,cpu:1",
        # The other backend converts the model first, for which a worker that is soon killed never has the
        # time.
        "VECTORMILL_WORKER_BACKEND": "torch",
        "VECTORMILL_WORKER_PRECISION": "fp32",
        "VECTORMILL_WORKER_THREADS": "1",
        # Otherwise the second job would not reach the model: its texts are those of the first.
        "VECTORMILL_WORKER_REUSE_BYTES": "0",
    }


@cache
def texts() -> list[str]:
    """Return short texts, all different, the same on every machine."""
    words = random.Random(12)
    lexicon = _lexicon()
    return [" ".join(words.choices(lexicon, k=_WORDS_PER_TEXT)) for _ in range(NUM_TEXTS)]


def _lexicon() -> list[str]:
    from tests.models import packaged_model

    vocabulary = json.loads((packaged_model() / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(word for word in vocabulary if word.isalpha() and word.isascii() and len(word) > 3)


def items(numbers: list[int], keys: list[str] | None = None) -> list[ItemJson]:
    """Return the texts with these numbers as items, with keys made of the numbers unless `keys` is given."""
    return [
        {"key": keys[position] if keys else f"k{number}", "text": texts()[number]}
        for position, number in enumerate(numbers)
    ]


@cache
def expected(directory: Path) -> NDArray[np.float32]:
    """Return transformers' vectors of the texts, by mean pooling, of unit length: float32 [texts, 32]."""
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
    """Return the number of each text with a wrong vector, and the largest difference of a component."""
    difference = np.abs(expected(directory)[numbers] - found).max(axis=1)
    return [
        (number, float(far)) for number, far in zip(numbers, difference, strict=True) if not far < TOLERANCE
    ]
