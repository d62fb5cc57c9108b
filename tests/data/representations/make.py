"""Compute the outputs of the authors' own packages for random models, and write them to arrays.npz beside this file.

It runs in an environment that has these packages, from the root of the repository:
PYTHONPATH=. python tests/data/representations/make.py
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tests.models import packaged_model
from tests.representations import GOLDEN_TEXTS, WIDE
from vectormill.models.random_embedder import write_random_embedder

HERE = Path(__file__).parent


def make_m3(directory: Path) -> dict[str, np.ndarray]:
    """Return what BGEM3FlagModel of FlagEmbedding computes."""
    from FlagEmbedding.inference.embedder.encoder_only.m3 import M3Embedder

    write_random_embedder(WIDE, packaged_model(), directory)
    for stem in ("sparse_linear", "colbert_linear"):
        torch.save(load_file(directory / f"{stem}.safetensors"), directory / f"{stem}.pt")
    model = M3Embedder(str(directory), use_fp16=False, devices="cpu")
    found = model.encode(GOLDEN_TEXTS, return_dense=True, return_sparse=True, return_colbert_vecs=True)
    arrays = {"m3/dense": found["dense_vecs"]}
    for number, (weights, vectors) in enumerate(
        zip(found["lexical_weights"], found["colbert_vecs"], strict=True)
    ):
        arrays[f"m3/{number}/words"] = np.array(sorted(map(int, weights)), np.int32)
        arrays[f"m3/{number}/weights"] = np.array(
            [weights[key] for key in sorted(weights, key=int)], np.float32
        )
        arrays[f"m3/{number}/vectors"] = vectors.astype(np.float16)
    return arrays


if __name__ == "__main__":
    scratch = Path(tempfile.mkdtemp())
    try:
        np.savez_compressed(HERE / "arrays.npz", allow_pickle=False, **make_m3(scratch / "m3"))
    finally:
        shutil.rmtree(scratch)
