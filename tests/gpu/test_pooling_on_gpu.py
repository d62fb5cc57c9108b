"""Packed pooling where its sums run on a GPU: the same vectors as padded on a CPU, whatever else is in the batch."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu.devices import DEVICES
from vectormill.models.poolings import POOLING_NAMES
from worker.batching.batch import Batch
from worker.encoder.padding import pad_batch
from worker.model.pooling import pool_hidden_states, pool_packed_states

MODES = tuple(POOLING_NAMES)
LENGTHS = (3, 120, 1, 64, 700, 2)
DIMENSION = 48
PROMPTS = pytest.mark.parametrize("prompts", [None, (1, 4, 0, 0, 2, 1)], ids=["whole", "behind prompts"])


def make_states() -> Tensor:
    """[tokens, dim]"""
    return torch.randn(sum(LENGTHS), DIMENSION, generator=torch.Generator().manual_seed(0))


def bounds_of(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def tensor_of(prompts: tuple[int, ...] | None, device: str) -> Tensor | None:
    return None if prompts is None else torch.tensor(prompts, device=device)


@PROMPTS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_are_pooled_as_padded_ones(
    mode: str, device: str, prompts: tuple[int, ...] | None
) -> None:
    batch = Batch.from_ids([np.ones(length, np.int32) for length in LENGTHS], prompts)
    padded = pad_batch(batch, 0)
    states = make_states()
    rows = torch.zeros(len(LENGTHS), max(LENGTHS), DIMENSION)
    rows[torch.from_numpy(padded.attention_mask).bool()] = states
    expected = pool_hidden_states(rows, torch.from_numpy(padded.pool_mask), (mode,))
    found = pool_packed_states(
        states.to(device), bounds_of(LENGTHS, device), tensor_of(prompts, device), (mode,)
    )
    assert found.device.type == device
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@PROMPTS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_is_pooled_to_the_same_bits_in_any_company(
    mode: str, device: str, prompts: tuple[int, ...] | None
) -> None:
    states, bounds = make_states().to(device), bounds_of(LENGTHS, device)
    together = pool_packed_states(states, bounds, tensor_of(prompts, device), (mode,))
    for row, (start, end) in enumerate(pairwise(bounds.tolist())):
        prompt = None if prompts is None else prompts[row : row + 1]
        own = bounds_of((end - start,), device)
        alone = pool_packed_states(states[start:end], own, tensor_of(prompt, device), (mode,))
        assert torch.equal(alone[0], together[row])
