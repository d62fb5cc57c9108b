"""How many batches the cores of a processor encode side by side."""

from dataclasses import replace
from pathlib import Path

import pytest

from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.described import describe_inventory
from worker.devices.device import split_processor
from worker.encoder.encoder import EncoderOrder
from worker.openvino.streams import choose_streams, count_streams, count_streams_in, predict_rate
from worker.runner.channel import NUM_BLOCKS
from worker.runner.messages import BATCHES_AHEAD, URGENT_BATCHES_AHEAD

MOST_CORES = 128


def test_no_number_of_cores_leaves_many_idle_or_has_large_streams() -> None:
    for num_threads in range(1, 257):
        num_streams = count_streams(num_threads, is_large=True)
        threads = num_threads // num_streams
        assert num_streams >= min(num_threads, 4), num_threads
        assert threads <= 4, num_threads
        assert num_threads - num_streams * threads <= max(1, num_threads // 16), num_threads
        assert num_threads // count_streams(num_threads) == 1, num_threads
        assert num_threads - count_streams(num_threads) <= num_threads // 16, num_threads


def rate_a_core(num_threads: int, *, is_large: bool = False) -> float:
    return predict_rate(num_threads, count_streams(num_threads, is_large=is_large)) / num_threads


def test_a_core_does_as_much_whatever_the_number_of_its_fellows() -> None:
    """No prime number is a cliff. Batches of a large model are shared by two to four: the remainder decides, so
    that 14 cores, two to a batch, do better than 13.
    """
    for is_large, bound in ((False, 0.9), (True, 0.75)):
        rates = {number: rate_a_core(number, is_large=is_large) for number in range(1, MOST_CORES + 1)}
        for number in range(1, MOST_CORES):
            pair = rates[number], rates[number + 1]
            assert min(pair) / max(pair) > bound, (number, is_large)


def test_the_batches_of_all_streams_have_memory_that_is_shared() -> None:
    assert count_streams(64) + BATCHES_AHEAD + URGENT_BATCHES_AHEAD <= NUM_BLOCKS


def test_streams_are_no_more_than_the_memory_holds() -> None:
    assert count_streams(64, 5) == 5
    assert count_streams(8, 5) == 4, "two threads each, and none is left over"
    assert count_streams(2, 100) == 2
    assert count_streams_in(free_bytes=10 << 30, weight_bytes=6 << 30, batch_bytes=256 << 20) == 8
    assert count_streams_in(free_bytes=1 << 30, weight_bytes=6 << 30, batch_bytes=256 << 20) == 1


def test_a_model_s_streams_obey_its_size_and_the_memory_that_was_planned_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    device = split_processor(describe_inventory("64cores,256GiB"), 1)[0]
    order = EncoderOrder(card, device, "openvino", "fp32", device.num_threads, Path())
    assert choose_streams(order, "fp32") == 61
    # 86 MiB of weights, and of the rest half; 16 MB and 1,024 tokens of 20 kB a stream.
    cramped = replace(order, device=replace(device, free_bytes=500 << 20))
    assert choose_streams(cramped, "fp32") in range(4, 8)
    # Eight times as slow, it is as large as BERT-base.
    monkeypatch.setattr("worker.openvino.streams.CORE_FLOP_PER_SECOND", 50e9 / 8)
    assert choose_streams(order, "fp32") == 16
