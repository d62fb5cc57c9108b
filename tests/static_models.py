"""Tables of random static embeddings as their authors' packages write them."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer as RustTokenizer

from tests.models import packaged_model

# By model2vec, with its vectors (tests/data/model2vec/make.py).
GOLDEN: Final = Path(__file__).parent / "data" / "model2vec"
KNOWN: Final[dict[str, Any]] = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))


def write_static(directory: Path, *, normalize: bool, truncated: int | None = None) -> Path:
    """Write random static embeddings for the packaged model's tokenizer as sentence-transformers saves them."""
    directory.mkdir(exist_ok=True)
    tokenizer = RustTokenizer.from_file(str(packaged_model() / "tokenizer.json"))
    tokenizer.no_padding()
    if truncated is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(truncated)
    tokenizer.save(str(directory / "tokenizer.json"))
    table = np.random.default_rng(0).standard_normal((tokenizer.get_vocab_size(), 48), dtype=np.float32)
    save_file({"embedding.weight": table}, directory / "model.safetensors")
    kinds = [("", "sentence_transformer.modules.static_embedding.StaticEmbedding")]
    kinds += [("1_Normalize", "base.modules.normalize.Normalize")] if normalize else []
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    return directory
