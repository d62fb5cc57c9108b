"""How many batches the cores of a processor encode side by side."""

from dataclasses import replace
from pathlib import Path

import pytest

from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.described import describe_inventory
from worker.devices.device import split_processor
from worker.encoder.encoder import EncoderOrder
from worker.openvino.streams import choose_streams, count_streams, count_streams_in


@pytest.mark.parametrize(
    ("num_threads", "num_streams"),
    [
        (1, 1),
        (2, 2),  # a core each
        (4, 4),
        (5, 5),
        (6, 6),
        (7, 7),
        (8, 4),  # two cores each
        (10, 5),
        (11, 5),  # and one is left, which tokenizes
        (12, 4),  # three cores each
        (13, 4),
        (16, 4),
        (18, 6),
        (32, 8),  # four cores each, and no more
        (64, 16),
        (96, 24),
    ],
)
def test_streams_share_the_threads(num_threads: int, num_streams: int) -> None:
    assert count_streams(num_threads) == num_streams


@pytest.mark.parametrize("num_threads", range(1, 257))
def test_no_number_of_cores_leaves_many_idle_or_has_large_streams(num_threads: int) -> None:
    num_streams = count_streams(num_threads)
    threads = num_threads // num_streams
    assert num_streams >= min(num_threads, 4)
    assert threads <= 4
    assert num_threads - num_streams * threads <= max(1, num_threads // 16)


@pytest.mark.parametrize(("odd", "even"), [(5, 4), (7, 6), (11, 10), (13, 12)])
def test_an_odd_number_of_cores_has_no_fewer_streams_than_one_core_less(odd: int, even: int) -> None:
    assert count_streams(odd) >= count_streams(even)


def test_streams_are_no_more_than_the_memory_holds() -> None:
    assert count_streams(64, 5) == 5
    assert count_streams(2, 100) == 2
    assert count_streams_in(free_bytes=10 << 30, weight_bytes=6 << 30, batch_bytes=256 << 20) == 8
    assert count_streams_in(free_bytes=1 << 30, weight_bytes=6 << 30, batch_bytes=256 << 20) == 1


def test_a_model_s_streams_obey_the_memory_that_was_planned_for_it() -> None:
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    device = split_processor(describe_inventory("64cores,256GiB"), 1)[0]
    order = EncoderOrder(card, device, "openvino", "fp32", device.num_threads, Path())
    assert choose_streams(order, "fp32") == 16
    # 86 MiB of weights, and of the rest half; 16 MB and 1,024 tokens of 20 kB a stream.
    cramped = replace(order, device=replace(device, free_bytes=500 << 20))
    assert choose_streams(cramped, "fp32") in range(4, 8)
