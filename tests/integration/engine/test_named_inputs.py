"""A model process takes inputs by their names and gives rows of any length: two inputs, and records of bytes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.encoder.encoder import Choice, DirectEncoder, EncoderOrder, EncoderReport
from worker.runner.messages import Encode, Encoded, Load, Loaded
from worker.runner.runner import Runner
from worker.tokens.tokenized import TOKEN_TYPE_IDS


class PairEncoder(DirectEncoder):
    """Says of each pair, as JSON, the ids of its two texts."""

    def encode(self, batch: Batch) -> Ragged:
        records = []
        for row in range(len(batch)):
            ids, types = batch.inputs["input_ids"].row(row), batch.inputs[TOKEN_TYPE_IDS].row(row)
            record = json.dumps([ids[types == side].tolist() for side in (0, 1)])
            records.append(np.frombuffer(record.encode(), np.uint8))
        return Ragged.from_rows(records, np.uint8)

    def describe(self) -> EncoderReport:
        choice = Choice("fake", "for tests")
        return EncoderReport(choice, choice, choice, "none", 1, 0.0, gives_vectors=False)


def load_pair_encoder(order: EncoderOrder) -> PairEncoder:
    return PairEncoder()


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    device = split_processor(detect_inventory(), 1)[0]
    order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, tmp_path)
    started = Runner(Load(f"{__name__}:load_pair_encoder", order), os.environ)
    yield started
    started.kill()


def test_pairs_go_in_as_two_inputs_and_records_of_any_length_come_out(runner: Runner) -> None:
    assert isinstance(runner.receive()[0], Loaded)
    pairs = [([1, 2, 3], [4]), ([], [5, 6]), ([7], [])]
    batch = Batch(
        {
            "input_ids": Ragged.from_rows([np.array(a + b) for a, b in pairs], np.int32),
            TOKEN_TYPE_IDS: Ragged.from_rows(
                [np.array([0] * len(a) + [1] * len(b)) for a, b in pairs], np.int8
            ),
        }
    )
    runner.send(Encode(1, batch, is_urgent=False))
    runner.send(Encode(2, batch.take(np.array([2, 1])).part(1, 2), is_urgent=False))
    said = [runner.receive()[0] for _ in range(4)]
    found = {
        message.number: [json.loads(message.results.row(i).tobytes()) for i in range(len(message.results))]
        for message in said
        if isinstance(message, Encoded)
    }
    assert found == {1: [[[1, 2, 3], [4]], [[], [5, 6]], [[7], []]], 2: [[[], [5, 6]]]}
