"""Tables of random static embeddings as their authors' packages write them."""

import json
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from tests.models import packaged_model

# By model2vec, with its vectors (tests/data/model2vec/make.py).
GOLDEN: Final = Path(__file__).parent / "data" / "model2vec"
KNOWN: Final[dict[str, Any]] = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))


def write_static(directory: Path, *, normalize: bool, truncated: int | None = None) -> Path:
    """Write random static embeddings for the packaged model's tokenizer with sentence-transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

        tokenizer = RustTokenizer.from_file(str(packaged_model() / "tokenizer.json"))
        if truncated is None:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(truncated)
        table = np.random.default_rng(0).standard_normal((tokenizer.get_vocab_size(), 48), dtype=np.float32)
        modules: list[Any] = [StaticEmbedding(tokenizer, embedding_weights=table)]
        modules += [Normalize()] if normalize else []
        SentenceTransformer(modules=modules, device="cpu").save(str(directory))
    return directory
