"""The packed kernel and the copies to a GPU and back. Rows for the CPU run the same code with the exact kernel in fp32.

Elsewhere the one call that needs CUDA is replaced: tests/contract/test_packed_agrees.py.
"""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from tests.contract.packed_models import MODELS, make_sequences, make_transformer
from tests.gpu.devices import DEVICES, NEEDS_GPU, find_device
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.batching.batch import Batch
from worker.encoder.backends import load_encoder
from worker.encoder.choice import read_attention_shape
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.model.cuda_pass import CudaPass
from worker.model.packed import EXACT, FLASH, PackedNetwork, exact_kernel, flash_kernel, pack_batch
from worker.model.pooling import pool_packed_states

CARD = Registry({}).card(DEFAULT_MODEL)
LENGTHS = (1, 300, 17, 64, 128, 1000, 2)


def smallest_cosine(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float(cosine_similarity(a.float().cpu(), b.float().cpu(), dim=-1).min())


def make_heads(num_heads: int, num_key_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and bounds in fp32 on the CPU."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    query, key, value = (
        torch.randn(tokens, heads, head_dim) for heads in (num_heads, num_key_heads, num_key_heads)
    )
    return query, key, value, torch.tensor([0, *LENGTHS]).cumsum(0).int()


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 64), (15, 0)])
@pytest.mark.parametrize("heads", [(12, 12, 64), (12, 4, 64), (16, 8, 128), (4, 4, 8), (2, 1, 256)])
def test_the_packed_kernel_computes_what_the_exact_one_does(
    heads: tuple[int, int, int], window: tuple[int, int], dtype: torch.dtype
) -> None:
    query, key, value, bounds = make_heads(*heads)
    expected = exact_kernel(query, key, value, bounds, max(LENGTHS), None, window)
    query, key, value = (part.to("cuda", dtype) for part in (query, key, value))
    found = flash_kernel(query, key, value, bounds.cuda(), max(LENGTHS), None, window)
    assert smallest_cosine(found, expected) >= 0.999


@NEEDS_GPU
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
@pytest.mark.parametrize("heads", [(12, 12, 64), (16, 8, 128)])
def test_the_packed_kernel_gives_a_sequence_the_same_bits_in_any_company(
    heads: tuple[int, int, int], window: tuple[int, int]
) -> None:
    query, key, value, bounds = make_heads(*heads)
    query, key, value = (part.to("cuda", torch.bfloat16) for part in (query, key, value))
    together = flash_kernel(query, key, value, bounds.cuda(), max(LENGTHS), None, window)
    for start, end in pairwise(bounds.tolist()):
        own = slice(start, end)
        alone = torch.tensor([0, end - start], dtype=torch.int32, device="cuda")
        found = flash_kernel(query[own], key[own], value[own], alone, end - start, None, window)
        assert torch.equal(found, together[own])


@pytest.mark.parametrize(
    ("device", "dtype", "smallest"),
    [
        ("cpu", torch.float32, 0.9999),
        pytest.param("cuda", torch.float16, 0.999, marks=NEEDS_GPU),
        # These models' random weights are large: to round every layer's output to bf16 alone makes 0.9994 of the worst.
        pytest.param("cuda", torch.bfloat16, 0.995, marks=NEEDS_GPU),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_gives_the_vectors_of_fp32_on_a_processor(
    name: str, device: str, dtype: torch.dtype, smallest: float
) -> None:
    expected = packed_vectors(make_transformer(name), EXACT, "cpu", torch.float32)
    found = packed_vectors(make_transformer(name), EXACT if device == "cpu" else FLASH, device, dtype)
    assert smallest_cosine(found, expected) >= smallest


@torch.inference_mode()
def packed_vectors(transformer: Any, kernel: str, device: str, dtype: torch.dtype) -> Tensor:
    """[n, dim], mean pooled."""
    transformer = transformer.to(device, dtype)
    network = PackedNetwork(
        SimpleNamespace(transformer=transformer, dense=nn.Sequential(), modes=("mean",)),  # type: ignore[arg-type]
        kernel,
    )
    batch = pack_batch(Batch.from_ids(make_sequences()), read_attention_shape(transformer.config))
    bounds = torch.from_numpy(batch.cu_seqlens).to(device, torch.int32)
    states = network.hidden_states(
        torch.from_numpy(batch.input_ids).to(device),
        torch.from_numpy(batch.position_ids).to(device),
        bounds,
        batch.max_seqlen,
    )
    return pool_packed_states(states, bounds, None, ("mean",))


def load(kind: str, directory: Path, precision: str, attention: str) -> Encoder:
    order = EncoderOrder(CARD, find_device(kind), "torch", precision, 1, directory, attention)
    return load_encoder(order)


def make_batch(prompt_length: int = 0) -> Batch:
    tokens = np.random.default_rng(1)
    lengths = [3, 120, 17, 64, 128, 40, 9]
    rows = [tokens.integers(1000, 30000, length).astype(np.int32) for length in lengths]
    return Batch.from_ids(rows, [prompt_length] * len(rows))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prompt_length", [0, 2])
def test_the_packaged_model_packed_agrees_with_padding_in_fp32(
    prompt_length: int, device: str, tmp_path: Path
) -> None:
    batch = make_batch(prompt_length)
    expected = torch.from_numpy(load("cpu", tmp_path, "fp32", "padded").encode(batch).matrix)
    precision, attention = ("fp32", "packed") if device == "cpu" else ("auto", "auto")
    encoder = load(device, tmp_path, precision, attention)
    report = encoder.describe()
    assert report.is_packed
    assert report.attention.startswith("packed")
    assert report.notes == ()
    found = torch.from_numpy(encoder.encode(batch).matrix)
    assert smallest_cosine(found, expected) >= 0.999
    alone = np.concatenate([encoder.encode(batch.part(row, row + 1)).matrix for row in range(len(batch))])
    assert smallest_cosine(torch.from_numpy(alone), found) >= 0.999


@NEEDS_GPU
def test_fp32_is_padded_and_says_why(tmp_path: Path) -> None:
    report = load("cuda", tmp_path, "fp32", "auto").describe()
    assert not report.is_packed
    assert "16-bit" in report.notes[0]


@pytest.mark.parametrize("device", DEVICES)
def test_batches_prepared_and_started_ahead_get_their_own_vectors(device: str, tmp_path: Path) -> None:
    encoder = load(device, tmp_path, "fp32", "padded")
    batch = make_batch()
    parts = [batch.part(0, 2), batch.part(2, 5), batch.part(5, 7)]
    expected = [encoder.encode(part).matrix for part in parts]
    for _ in range(3):  # again, in the pinned memory that the rounds before gave back
        passes = [encoder.prepare(part) for part in parts]
        for forward_pass in passes:
            forward_pass.start()
        found: list[NDArray[np.float32]] = [forward_pass.results().matrix for forward_pass in passes]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@NEEDS_GPU
def test_vectors_come_back_through_pinned_memory() -> None:
    forward_pass = CudaPass(
        [np.arange(6).reshape(2, 3)], lambda ids: ids * 2, torch.device("cuda:0"), torch.cuda.Stream()
    )
    forward_pass.start()
    assert forward_pass.results().matrix.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert forward_pass._vectors is not None
    assert forward_pass._vectors.is_pinned()


# It ends as the runner does: what CUDA raises while Python tidies up would be another way to end.
LOSE_DEVICE = """
import os
import numpy as np, torch
from worker.model.cuda_pass import CudaPass
from worker.encoder.encoder import DeviceLost

table = torch.zeros(4, 4, device="cuda")
forward_pass = CudaPass([np.array([4000])], lambda ids: table[ids], torch.device("cuda:0"), torch.cuda.Stream())
try:
    forward_pass.start()
    forward_pass.results()
except DeviceLost as error:
    print("lost:", error, flush=True)
os._exit(0)
"""


@NEEDS_GPU
def test_an_error_after_which_cuda_refuses_everything_is_told_apart() -> None:
    """In a process of its own, since nothing on the device works in it afterwards."""
    answer = subprocess.run([sys.executable, "-c", LOSE_DEVICE], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("lost: CUDA error")
