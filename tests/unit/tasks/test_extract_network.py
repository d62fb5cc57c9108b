"""The network's numbers beside the reference's, alone and in any batch; and what becomes of a faulty network."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.rexuninlu import (
    CPU,
    GOLDEN,
    MODELS,
    by_network,
    drive,
    extract_of,
    join_inputs,
    list_cases,
    load,
    read_arrays,
)
from vectormill.domain.schema import MAX_WINDOW_TOKENS
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.padding import pad_batch
from worker.tasks.extract.extraction import Prompts
from worker.tasks.extract.model import network
from worker.tasks.extract.model.config import Switches, read_switches
from worker.tasks.extract.model.network import Convolution, RexNetwork, load_network

MAX_LOGIT_ERROR = 1e-4
MAX_HIDDEN_ERROR = 1e-5
SHORT = 80  # tokens, of which most cases have fewer


@cache
def list_calls(model: str) -> tuple[Batch, list[tuple[str, int]]]:
    """All calls of the first level of the model's natural cases: their sequences, and of each its key and step."""
    levels, names = [], []
    for case in list_cases("natural", model):
        prompts = extract_of(case).start()
        if prompts is not None:
            levels.append(prompts)
            names += [(call["key"], call["logits_step"]) for call in case["calls"][: len(prompts)]]
    return join_inputs(levels), names


def cut_batches(rows: list[int], size: int) -> Iterator[list[int]]:
    """All rows in batches of so many, in any order."""
    random.Random(size).shuffle(rows)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def compute(net: RexNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [n, length, length] and hidden states [n, length, hidden]."""
    padded = pad_batch(batch, 0)
    tokens = {name: torch.from_numpy(values) for name, values in padded.tokens.items()}
    is_token = torch.from_numpy(padded.attention_mask).bool()
    with torch.inference_mode():
        return net(**tokens, is_token=is_token), net.encode(**tokens, is_token=is_token)


def find_errors(
    net: RexNetwork, model: str, size: int, *, longest: int = MAX_WINDOW_TOKENS
) -> tuple[float, float]:
    """The greatest errors of logits and hidden states over all calls of the first level, in batches of this size."""
    batch, names = list_calls(model)
    errors = [(0.0, 0.0)]
    for rows in cut_batches(np.flatnonzero(batch.lengths <= longest).tolist(), size):
        logits, hidden = compute(net, batch.take(np.array(rows)))
        for number, row in enumerate(rows):
            key, step = names[row]
            length = int(batch.lengths[row])
            errors.append(
                (
                    find_error(logits[number, :length:step, :length:step], f"{key}/logits"),
                    find_error(hidden[number, :length:step], f"{key}/hidden"),
                )
            )
    return max(error for error, _ in errors), max(error for _, error in errors)


def find_error(values: Tensor, name: str) -> float:
    return float((values - torch.from_numpy(read_arrays()[name])).abs().max())


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("model", MODELS)
def test_a_sequence_has_the_references_numbers_alone_and_in_any_batch(model: str, size: int) -> None:
    logits, hidden = find_errors(load(model), model, size)
    assert logits <= MAX_LOGIT_ERROR
    assert hidden <= MAX_HIDDEN_ERROR


@pytest.mark.parametrize("model", MODELS)
def test_later_levels_have_the_references_numbers(model: str) -> None:
    """Prompts with several paths, which do not see one another."""
    num_compared = 0
    for case in list_cases("natural", model):
        if case["num_calls"] != len(case["calls"]) or len(case["levels"]) < 2:
            continue
        sequences = join_inputs(drive(extract_of(case), by_network(load(model))))
        for number, call in enumerate(case["calls"]):
            logits, _ = compute(load(model), sequences.part(number, number + 1))
            step = call["logits_step"]
            assert find_error(logits[0, ::step, ::step], f"{call['key']}/logits") <= MAX_LOGIT_ERROR
            num_compared += 1
    assert num_compared > 10


def test_signs_of_long_texts_are_the_references_wherever_they_are_certain() -> None:
    for model in MODELS:
        case = next(case for case in list_cases(model=model) if case["id"].endswith("long_two_windows"))
        sequences = join_inputs(drive(extract_of(case), by_network(load(model))))
        for number, call in enumerate(case["calls"]):
            logits = compute(load(model), sequences.part(number, number + 1))[0][0].numpy()
            bits = read_arrays()[f"{call['key']}/positive_bits"]
            is_positive = np.unpackbits(bits, axis=1, count=len(logits)).astype(bool)
            is_certain = np.abs(logits) > MAX_LOGIT_ERROR
            assert ((logits > 0) == is_positive)[is_certain].all()
            assert is_certain.mean() > 0.999


# What others do, and what stock code does: each is seen by the same comparison that the network passes.


def rotate_by_place(self: RexNetwork, states: Tensor, position_ids: Tensor) -> Tensor:
    positions = torch.arange(position_ids.shape[1]).expand_as(position_ids)
    return ROTATE(self, states, positions)


def index_by_place(self: RexNetwork, position_ids: Tensor) -> tuple[Tensor, slice]:
    return INDEX(self, torch.arange(position_ids.shape[1]).expand_as(position_ids))


def convolve_padding(self: Convolution, embedded: Tensor, states: Tensor, is_token: Tensor) -> Tensor:
    """Padding of all sequences comes from the embedding of id 0, as a model reads it that does not know of it."""
    found = self.conv(embedded.transpose(1, 2)).transpose(1, 2) * is_token
    convolved: Tensor = self.LayerNorm(states + self.activation(found)) * is_token
    return convolved


def round_all_distances(switches: Switches) -> Switches:
    return replace(switches, max_relative_positions=switches.max_position_embeddings)


ROTATE, INDEX = RexNetwork._rotate, RexNetwork._index_distances


def see_all(groups: Tensor) -> Tensor:
    return torch.ones(*groups.shape, groups.shape[1], dtype=torch.bool)


@pytest.mark.parametrize(
    ("models", "owner", "name", "fault"),
    [
        (MODELS, RexNetwork, "_rotate", rotate_by_place),  # rotary by index
        (MODELS, RexNetwork, "_index_distances", index_by_place),  # relative positions by index
        (MODELS, network, "_see", see_all),  # a mask of padding alone
        (("model",), Convolution, "forward", convolve_padding),  # the convolution sees padding
    ],
)
def test_what_stock_code_does_is_noticed(
    models: tuple[str, ...],
    owner: object,
    name: str,
    fault: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    for model in models:
        assert find_errors(load(model), model, size=3, longest=SHORT)[0] > 0.05


def test_logarithmic_distances_although_there_are_none_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only texts with distances beyond half the buckets show it, 128."""
    monkeypatch.setattr(network, "read_switches", lambda path: round_all_distances(read_switches(path)))
    faulty = load_network(GOLDEN / "model", torch.float32, CPU)
    assert find_errors(faulty, "model", size=1)[0] > 0.05


def test_heads_that_take_turns_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all biases fit at once."""
    monkeypatch.setattr(network, "BIAS_BYTES", 1)
    assert find_errors(load("model"), "model", size=8, longest=SHORT)[0] <= MAX_LOGIT_ERROR


def test_sixteen_bits_stay_near() -> None:
    """Of the logits, which reach 25: bf16 has 8 bits of them."""
    for model in MODELS:
        logits, _ = find_errors(
            load_network(GOLDEN / model, torch.bfloat16, CPU), model, size=8, longest=SHORT
        )
        assert logits < 1.5


def test_prompts_of_several_extractions_are_one_batch() -> None:
    """What comes back for a sequence does not depend on whose sequences are beside it."""
    net, levels = load("model"), []
    for case in list_cases("natural", "model")[:8]:
        prompts = extract_of(case).start()
        assert prompts is not None
        levels.append(prompts)
    together = by_network(net)(Prompts(join_inputs(levels).inputs, np.zeros(0, np.int32)))
    alone = Ragged.join([by_network(net)(prompts) for prompts in levels])
    np.testing.assert_array_equal(together.lengths, alone.lengths)
    np.testing.assert_allclose(together.covered, alone.covered, atol=MAX_LOGIT_ERROR)
