"""How far a model is loaded: counted where it is read, shown on a terminal and in a log."""

import logging
from collections.abc import Callable

import pytest
import torch

from vectormill.models.families import find_layout
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.encoder.encoder import Loading
from worker.loading import LoadingDisplay
from worker.model.network import count_weight_bytes, load_transformer
from worker.parallel.filling import build_skeleton, fill

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)

Readings = list[tuple[int, int]]


def load_whole(on_read: Callable[[int, int], None]) -> None:
    load_transformer(CARD, torch.float32, on_read)


def load_in_slices(on_read: Callable[[int, int], None]) -> None:
    skeleton = build_skeleton(CARD, torch.float32)
    fill(skeleton, CARD, find_layout("bert"), torch.device("cpu"), on_read=on_read)


@pytest.mark.parametrize("load", [load_whole, load_in_slices])
def test_loading_is_told_tensor_by_tensor_up_to_the_last_byte(
    load: Callable[[Callable[[int, int], None]], None],
) -> None:
    readings: Readings = []
    load(lambda num_bytes_read, num_bytes: readings.append((num_bytes_read, num_bytes)))
    assert len(readings) > 50
    assert readings == sorted(readings)
    last, total = readings[-1]
    assert last == total == {number for _, number in readings}.pop()
    assert 0.9 * count_weight_bytes(CARD) < total <= count_weight_bytes(CARD)


def test_a_log_tells_every_few_seconds_what_was_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    monkeypatch.setattr("worker.loading.time.monotonic", lambda: now[0])
    logged = LoadingDisplay("my-7b")
    for second in range(12):
        now[0] = float(second)
        logged.show(second * 10**9, 13 * 10**9)
    logged.close([Loading("cuda:0", 13 * 10**9, 13.04)])
    assert caplog.messages == [
        "Loading my-7b: 5.0 of 13.0 GB read in 5 s",
        "Loading my-7b: 10.0 of 13.0 GB read in 10 s",
        "Loaded my-7b on cuda:0: 13.00 GB in 13.0 s",
    ]
