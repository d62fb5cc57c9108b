"""A tiny jina-embeddings-v3 with random weights and adapters, and what peft makes of it (tests/data/adapters)."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import save_file

from tests.contract.packed_models import SIZES, TOKENIZER

DATA: Final = Path(__file__).parent / "data" / "adapters"
ADAPTER: Final = "retrieval_query"
RANK: Final = 3
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


def write_adapter(directory: Path, transformer: Any) -> None:
    """Write random matrices for all linear layers and the vocabulary of a transformer, named as peft names them."""
    tensors, draws = {}, np.random.default_rng(1)
    for path, module in transformer.named_modules():
        is_table = path.endswith(("word_embeddings", "embed_tokens", "tok_embeddings"))
        if not is_table and (not isinstance(module, torch.nn.Linear) or path.startswith("pooler")):
            continue
        # A decoder is trained in a class with a head, whose names begin with that of the transformer.
        prefix = "base_model.model.model." if path.startswith("layers.") else "base_model.model."
        num_rows, num_columns = module.weight.shape
        of_a, of_b = (num_rows, num_columns) if is_table else (num_columns, num_rows)
        for kind, shape in {"A": (RANK, of_a), "B": (of_b, RANK)}.items():
            name = f"lora_embedding_{kind}" if is_table else f"lora_{kind}.weight"
            tensors[f"{prefix}{path}.{name}"] = draws.normal(0, 0.3, shape).astype(np.float32)
    (directory / ADAPTER).mkdir()
    save_file(tensors, directory / ADAPTER / "adapter_model.safetensors")
    (directory / ADAPTER / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK})
    )


def write_config(directory: Path, **changes: object) -> None:
    """Change the configuration of the adapter in a model's directory."""
    path = directory / ADAPTER / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
