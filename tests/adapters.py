"""A tiny jina-embeddings-v3 with random weights and adapters, and what peft makes of it (tests/data/adapters)."""

import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
import torch

from tests.contract.packed_models import SIZES, TOKENIZER

DATA: Final = Path(__file__).parent / "data" / "adapters"
ADAPTER: Final = "retrieval_query"
IDS: Final = ((5, 17, 40, 2), (9, 8, 7, 250, 100, 33, 3))


def write_adapted(directory: Path) -> Path:
    """Write the model with its adapter beside; its weights come from NumPy, and are the same everywhere."""
    import transformers

    config = transformers.JinaEmbeddingsV3Config(**{**SIZES, "num_hidden_layers": 2})
    model = transformers.JinaEmbeddingsV3Model(config)
    draws = np.random.default_rng(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            values = draws.normal(0, 0.2, tuple(parameter.shape)).astype(np.float32)
            parameter.copy_(torch.from_numpy(values + (values.ndim == 1)))
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(TOKENIZER)
    if (DATA / ADAPTER).exists():
        shutil.copytree(DATA / ADAPTER, directory / ADAPTER)
    return directory


def write_config(directory: Path, **changes: object) -> None:
    """Change the configuration of the adapter in a model's directory."""
    path = directory / ADAPTER / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
