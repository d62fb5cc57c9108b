"""The bare loop: it computes the very batches that the engine formed, and how long a run will take is said before."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.cases.engine.pass_length import estimate_seconds, plan_copies
from benchmarks.mixes import PARAGRAPHS, Mix
from benchmarks.peers.catalogue import PEERS
from benchmarks.probes.machine import benchmark_device
from benchmarks.systems.bound.bare_openvino import BareLoop
from benchmarks.systems.bound.batch_log import FILE_NAME, BatchLog, RecordingEncoder, read_batches
from benchmarks.systems.child import ChildSystem
from benchmarks.systems.engine_alone import EngineAlone
from benchmarks.systems.line_up import BARE, BOUNDS, ENGINE, LineUp
from benchmarks.systems.missing import MissingSystem
from benchmarks.systems.protocol import BATCHES, ChildOrder
from tests.models import packaged_model
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import Encoder, EncoderReport
from worker.encoder.forward_pass import Deferred, ForwardPass

RATES = {"fp32": 100.0, "bf16": 300.0}


class Silent(Encoder):
    """Answers nothing."""

    def prepare(self, batch: Batch) -> ForwardPass:
        return Deferred(lambda: Ragged.from_matrix(np.zeros((len(batch), 2), dtype=np.float32)))

    def describe(self) -> EncoderReport:
        raise NotImplementedError  # nobody asks one that is only written down


def rows(batches: Sequence[Batch]) -> list[list[list[int]]]:
    return [[batch.inputs["input_ids"].row(i).tolist() for i in range(len(batch))] for batch in batches]


def test_batches_are_read_as_they_were_written_and_earlier_ones_are_not_among_them(tmp_path: Path) -> None:
    encoder = RecordingEncoder(Silent(), tmp_path / FILE_NAME)
    log = BatchLog(tmp_path)
    encoder.prepare(Batch.from_ids([np.array([1, 2], dtype=np.int32)]))
    log.skip()
    written = [[[5, 6, 7], [8]], [[9, 10]]]
    for batch in written:
        encoder.prepare(Batch.from_ids([np.array(row, dtype=np.int32) for row in batch]))
    log.copy_to(tmp_path / "last.bin")
    encoder._file.close()
    assert rows(read_batches(tmp_path / "last.bin")) == written


def test_the_loop_computes_each_batch_of_the_engine_once_with_its_ids_and_its_shape(
    tmp_path: Path, conversions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every ending of a batch is seen by the request that computed it."""
    (tmp_path / "openvino").symlink_to(conversions)
    order = ChildOrder(
        str(packaged_model()), "", "", str(tmp_path), options={BATCHES: str(tmp_path / "batches")}
    )
    engine = EngineAlone(order)
    try:
        encoded = engine(
            [f"sentence number {number} of some" + " words" * (number % 40) for number in range(60)]
        )
    finally:
        engine.stop()
    batches = read_batches(tmp_path / "batches")
    assert sum(len(batch) for batch in batches) == len(encoded.vectors) == 60
    assert sum(batch.num_tokens for batch in batches) == encoded.num_tokens

    loop = BareLoop(order)
    seen: list[NDArray[Any]] = []
    take = loop._encoder.take_request

    class Watched:
        """A request whose first input is noted when it is started."""

        def __init__(self) -> None:
            self.request = take()

        def set_input_tensor(self, place: int, tensor: Any) -> None:
            if place == 0:
                self.ids = tensor.data.copy()
            self.request.set_input_tensor(place, tensor)

        def start_async(self) -> None:
            seen.append(self.ids)
            self.request.start_async()

        def wait(self) -> None:
            self.request.wait()

    put = loop._encoder.put_request
    monkeypatch.setattr(loop._encoder, "take_request", Watched)
    monkeypatch.setattr(loop._encoder, "put_request", lambda watched: put(watched.request))
    bare = loop([])
    assert (bare.num_tokens, bare.num_computed_tokens) == (encoded.num_tokens, encoded.num_computed_tokens)
    assert bare.vectors.shape == (0, encoded.vectors.shape[1])
    assert bare.seconds is not None
    expected = [loop._encoder.prepare(batch).inputs["input_ids"] for batch in batches]
    assert sorted(ids.tobytes() for ids in seen) == sorted(ids.tobytes() for ids in expected)


def test_without_the_engine_there_is_nothing_that_a_bare_loop_could_compute(tmp_path: Path) -> None:
    line_up = LineUp(tmp_path, packaged_model(), [Mix(PARAGRAPHS, "", ("a",))], benchmark_device())
    alone = line_up.make([BARE], PEERS, BOUNDS)
    assert isinstance(alone[BARE], MissingSystem)
    both = line_up.make([BARE, ENGINE], PEERS, BOUNDS)
    assert list(both) == [ENGINE, BARE], "the batches are there when the loop wants them"
    assert all(isinstance(system, ChildSystem) for system in both.values())


def test_how_long_a_run_takes_is_foretold_from_its_arithmetic() -> None:
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    mix = Mix(PARAGRAPHS, "", tuple(f"{number} words of a text" for number in range(20_000)))
    one, two, peer = (
        estimate_seconds([mix], card, systems, repeat, RATES)
        for systems, repeat in (([ENGINE], 2), ([ENGINE, BARE], 2), (["sentence-transformers"], 2))
    )
    assert two == 2 * one
    assert peer > one
    assert estimate_seconds([mix, mix], card, [ENGINE], 2, RATES) < 2 * one
    assert plan_copies(1e12, RATES) > 1
