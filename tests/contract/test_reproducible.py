"""A reproducible encoder gives a text the same bits alone, in any batch, in any order, and after a restart."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.random_embedder import SMALL, write_random_embedder
from tests.contract.ranks import run_ranks
from tests.models import DEVICE, TinyModels, packaged_model, read_card
from tests.representations import write_masked_language_model
from vectormill.domain.errors import ModelError
from vectormill.domain.task import OUTPUTS as OUTPUT_NAMES
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.ragged import Ragged
from worker.batching.batch import OUTPUTS, Batch
from worker.devices import backends
from worker.devices.device import device_environment
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import DirectEncoder, Encoder, EncoderOrder, EncoderReport
from worker.encoder.outputs import find_bits
from worker.encoder.reproducible import ReproducibleEncoder
from worker.placement.placement import Rank
from worker.placement.strategies import PIPELINE, TENSOR
from worker.runner.starter import LOOPBACK

BACKENDS = pytest.mark.parametrize("backend", backends.BACKENDS)


def order_of(
    models: TinyModels, cache_dir: Path, backend: str, *, is_reproducible: bool = True
) -> EncoderOrder:
    card = read_card(models.transformer("Bert"))
    return EncoderOrder(
        card, DEVICE, backend, "auto", DEVICE.num_threads, cache_dir, is_reproducible=is_reproducible
    )


def draw_rows(count: int, longest: int) -> list[NDArray[np.int32]]:
    numbers = np.random.default_rng(5)
    lengths = np.minimum(numbers.geometric(1 / 20, size=count) + 2, longest)
    return [numbers.integers(1000, 20_000, size=length).astype(np.int32) for length in lengths.tolist()]


def encode(encoder: Encoder, rows: list[NDArray[np.int32]], sizes: NDArray[np.int64]) -> list[bytes]:
    """Return the bits of each row, encoded in batches of these sizes, repeatedly."""
    found, start = [], 0
    while start < len(rows):
        size = int(sizes[start % len(sizes)])
        results = encoder.encode(Batch.from_ids(rows[start : start + size]))
        found += [results.row(place).tobytes() for place in range(len(results))]
        start += size
    return found


def encode_shuffled(encoder: Encoder, rows: list[NDArray[np.int32]], seed: int) -> list[bytes]:
    numbers = np.random.default_rng(seed)
    order = numbers.permutation(len(rows))
    found = encode(encoder, [rows[place] for place in order], numbers.integers(1, 40, size=50))
    return [found[place] for place in np.argsort(order)]


@BACKENDS
def test_a_text_has_the_same_bits_in_any_batch(backend: str, models: TinyModels, cache_dir: Path) -> None:
    rows = draw_rows(200, 70)
    encoder = load_encoder(order_of(models, cache_dir, backend))
    alone = encode(encoder, rows, np.array([1]))
    for seed in range(3):
        assert encode_shuffled(encoder, rows, seed) == alone
    again = load_encoder(order_of(models, cache_dir, backend))
    assert encode_shuffled(again, rows, 7) == alone
    plain = load_encoder(order_of(models, cache_dir, backend, is_reproducible=False))
    said = [note for note in encoder.describe().notes if "same bits" in note]
    assert len(said) == 1
    vectors = np.stack([np.frombuffer(row, np.float32) for row in alone])
    others = np.stack([np.frombuffer(row, np.float32) for row in encode(plain, rows, np.array([1]))])
    assert np.abs(vectors - others).max() < 1e-2


def test_the_number_of_threads_changes_no_bits(models: TinyModels, cache_dir: Path) -> None:
    rows = draw_rows(60, 70)
    order = order_of(models, cache_dir, "openvino")
    found = [
        encode_shuffled(load_encoder(replace(order, num_threads=threads)), rows, threads)
        for threads in (1, 2)
    ]
    assert found[0] == found[1]


class Sums(DirectEncoder):
    """An encoder whose results depend on what `disturb` adds: a number for the shape and the place of each row."""

    def __init__(self, report: EncoderReport, disturb: Callable[[int, int], float]) -> None:
        self._report = report
        self._disturb = disturb

    def encode(self, batch: Batch) -> Ragged:
        sums = [batch.inputs["input_ids"].row(place).sum() for place in range(len(batch))]
        more = [self._disturb(len(batch), place) for place in range(len(batch))]
        return Ragged.from_matrix(np.array(sums, np.float32)[:, None] + np.array(more, np.float32)[:, None])

    def describe(self) -> EncoderReport:
        return self._report


def test_tiles_have_one_shape_and_a_model_for_which_that_is_not_enough_is_refused(
    models: TinyModels, cache_dir: Path
) -> None:
    order = order_of(models, cache_dir, "torch")
    report = load_encoder(order).describe()
    rows = draw_rows(40, 30)
    by_number = ReproducibleEncoder(Sums(report, lambda num_rows, place: num_rows / 64), order)
    assert encode_shuffled(by_number, rows, 1) == encode(by_number, rows, np.array([1]))
    with pytest.raises(ModelError, match="depend on the place of a text in its batch"):
        ReproducibleEncoder(Sums(report, lambda num_rows, place: place / 64), order)


def test_what_cannot_be_promised_is_refused(models: TinyModels, cache_dir: Path) -> None:
    order = order_of(models, cache_dir, "torch")
    with pytest.raises(ModelError, match="cuda:0 is not a processor"):
        load_encoder(replace(order, device=replace(DEVICE, name="cuda:0", kind="cuda")))


def encode_as_rank(number: int, order: EncoderOrder, folder: Path) -> None:
    """Compare the bits of texts in batches with those of each alone, and leave how many this rank has answered."""
    rows, sizes = draw_rows(60, 70), np.random.default_rng(3).integers(1, 40, size=50)
    for strategy in (PIPELINE, TENSOR):
        layers = (1, 1) if strategy == PIPELINE else (2,)
        rank = Rank(number, 2, strategy, layers, folder / "meeting_point", 60.0)
        encoder = load_encoder(replace(order, rank=rank))
        alone = encode(encoder, rows, np.array([1]))
        assert encode(encoder, rows, sizes) == alone
        assert encode(encoder, rows[::-1], sizes) == alone[::-1]
        assert encoder.describe().tile_tokens
        (folder / f"{strategy} {number}").write_text(str(len(alone)))


def test_a_text_has_the_same_bits_in_any_batch_of_devices_that_share_a_model(
    models: TinyModels, cache_dir: Path, tmp_path: Path
) -> None:
    order = order_of(models, cache_dir, "torch")
    environment = device_environment(DEVICE, 2) | LOOPBACK
    run_ranks(encode_as_rank, [(number, order, tmp_path) for number in range(2)], environment)
    answered = {
        strategy: [int((tmp_path / f"{strategy} {number}").read_text()) for number in range(2)]
        for strategy in (PIPELINE, TENSOR)
    }
    assert answered == {PIPELINE: [0, 60], TENSOR: [60, 0]}


def test_the_packaged_model_is_reproducible(cache_dir: Path) -> None:
    card = Registry({}).card(DEFAULT_MODEL)
    order = EncoderOrder(card, DEVICE, "auto", "auto", DEVICE.num_threads, cache_dir, is_reproducible=True)
    encoder = load_encoder(order)
    rows = draw_rows(100, 256)
    assert encode_shuffled(encoder, rows, 1) == encode(encoder, rows, np.array([1]))


def test_texts_that_ask_for_more_outputs_change_no_bits_of_others(cache_dir: Path, tmp_path: Path) -> None:
    card = read_card(write_random_embedder(SMALL, packaged_model(), tmp_path / "m3"))
    order = EncoderOrder(card, DEVICE, "torch", "auto", DEVICE.num_threads, cache_dir, is_reproducible=True)
    encoder = load_encoder(order)
    rows = [row % 200 + 5 for row in draw_rows(30, 40)]
    ids = Batch.from_ids(rows).inputs
    asks = np.arange(len(rows)) % 3 == 0
    bits = Ragged.from_scalars(np.where(asks, find_bits(OUTPUT_NAMES), 0).astype(np.int32))
    mixed = encoder.encode(Batch({**ids, OUTPUTS: bits}))
    plain = encoder.encode(Batch(ids))
    for place in range(len(rows)):
        alone = encoder.encode(Batch({**ids, OUTPUTS: bits}).part(place, place + 1))
        assert mixed.row(place).tobytes() == alone.row(0).tobytes()
        if not asks[place]:
            assert mixed.row(place).tobytes() == plain.row(place).tobytes()


def test_a_model_without_dense_vectors_is_reproducible(cache_dir: Path, tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    card = read_card(write_masked_language_model(tmp_path / "splade", "Bert", **small))
    encoder = load_encoder(EncoderOrder(card, DEVICE, "torch", "auto", 1, cache_dir, is_reproducible=True))
    rows = draw_rows(12, 40)
    asked = Ragged.from_scalars(np.full(len(rows), find_bits(card.outputs), np.int32))
    batch = Batch({**Batch.from_ids(rows).inputs, OUTPUTS: asked})
    together = encoder.encode(batch)
    for place in range(len(rows)):
        assert together.row(place).tobytes() == encoder.encode(batch.part(place, place + 1)).row(0).tobytes()
