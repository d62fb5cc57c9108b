"""Compute the outputs of the authors' own packages for random models, and write them beside this file.

Each package (FlagEmbedding 1.4.2, colbert-ai 0.2.22 with transformers 4.49, PyLate 1.6.0) has an environment of its
own, in which this runs from the root of the repository:
PYTHONPATH=. python tests/data/representations/make.py m3|stanford|pylate
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.random_embedder import write_random_embedder
from tests.models import packaged_model
from tests.representations import (
    GOLDEN_TEXTS,
    TOKEN_TEXTS,
    WIDE,
    write_pylate_colbert,
    write_stanford_colbert,
)

Arrays = dict[str, NDArray[np.generic]]


def make_m3(directory: Path) -> Arrays:
    """Return what FlagEmbedding computes."""
    from FlagEmbedding.inference.embedder.encoder_only.m3 import M3Embedder

    write_random_embedder(WIDE, packaged_model(), directory)
    for stem in ("sparse_linear", "colbert_linear"):
        torch.save(load_file(directory / f"{stem}.safetensors"), directory / f"{stem}.pt")
    model = M3Embedder(str(directory), use_fp16=False, devices="cpu")
    found = model.encode(GOLDEN_TEXTS, return_dense=True, return_sparse=True, return_colbert_vecs=True)
    arrays: Arrays = {"dense": found["dense_vecs"]}
    for number, (weights, vectors) in enumerate(
        zip(found["lexical_weights"], found["colbert_vecs"], strict=True)
    ):
        arrays[f"{number}/words"] = np.array(sorted(map(int, weights)), np.int32)
        arrays[f"{number}/weights"] = np.array([weights[key] for key in sorted(weights, key=int)], np.float32)
        arrays[f"{number}/vectors"] = vectors.astype(np.float16)
    return arrays


def make_stanford(directory: Path) -> Arrays:
    """Return what colbert-ai computes."""
    from colbert.infra import ColBERTConfig
    from colbert.modeling.checkpoint import Checkpoint

    write_stanford_colbert(directory)
    model = Checkpoint(str(directory), colbert_config=ColBERTConfig(), verbose=0)
    queries = model.queryFromText(TOKEN_TEXTS)
    documents = model.docFromText(TOKEN_TEXTS, keep_dims=False)
    return _name(queries, documents)


def make_pylate(directory: Path) -> Arrays:
    """Return what PyLate computes."""
    from pylate.models import ColBERT

    write_pylate_colbert(directory)
    model = ColBERT(str(directory), device="cpu")
    queries, documents = (model.encode(TOKEN_TEXTS, is_query=is_query) for is_query in (True, False))
    return _name(queries, documents)


def _name(queries: NDArray[np.generic], documents: NDArray[np.generic]) -> Arrays:
    return {
        f"{side}/{number}": np.asarray(vectors, np.float16)
        for side, given in (("query", queries), ("document", documents))
        for number, vectors in enumerate(given)
    }


MAKERS: Mapping[str, Callable[[Path], Arrays]] = {
    "m3": make_m3,
    "stanford": make_stanford,
    "pylate": make_pylate,
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        arrays = MAKERS[sys.argv[1]](Path(scratch) / "model")
        np.savez_compressed(Path(__file__).parent / f"{sys.argv[1]}.npz", allow_pickle=False, **arrays)
