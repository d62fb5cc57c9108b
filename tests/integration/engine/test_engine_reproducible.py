"""A reproducible worker gives real texts the same bits in other batches and orders, and if its model process dies."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import wait_for
from vectormill.corpus import read_docstrings
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest
from worker.settings import WorkerSettings

NUM_TEXTS = 600
PATIENCE_SECONDS = 600.0  # with many texts


def encode_all(
    cache_dir: Path,
    texts: list[bytes],
    part_texts: int,
    max_batch_tokens: int,
    *,
    num_workers: int = 1,
    num_kills: int = 0,
) -> list[bytes]:
    """Return the bits of each text's vector, encoded in requests of `part_texts`, several at a time.

    As many times as `num_kills`, a model process is killed while it encodes.
    """
    card = Registry({}).card(DEFAULT_MODEL)
    settings = WorkerSettings(reproducible=True, reuse_bytes=0, max_batch_tokens=max_batch_tokens)
    devices = split_processor(detect_inventory(), num_workers)
    engines = [Engine(card, device, settings, cache_dir) for device in devices]
    spec = make_spec(card, EncodingOptions())

    def encode(number: int) -> list[bytes]:
        part = texts[number * part_texts : (number + 1) * part_texts]
        request = EncodeRequest(str(number), spec, part, False, 1_000_000)
        found = engines[number % num_workers].encode(request, threading.Event())
        assert not found.failures
        return [row.tobytes() for row in found.vectors]

    def count_restarts() -> int:
        return sum(engine.report()["num_restarts"] for engine in engines)

    for engine in engines:
        engine.start()
    try:
        with ThreadPoolExecutor(4 * num_workers) as threads:
            parts = threads.map(encode, range(-(-len(texts) // part_texts)))
            for number in range(num_kills):
                victim = engines[number % num_workers]._executor
                wait_for(partial(getattr, victim._in_flight, "started"), PATIENCE_SECONDS)
                pid = victim.find_pid()
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                wait_for(partial(is_above, count_restarts, number), PATIENCE_SECONDS)
            found = [row for part in parts for row in part]
        assert count_restarts() == num_kills
    finally:
        for engine in engines:
            engine.stop()
    return found


def is_above(count: Callable[[], int], number: int) -> bool:
    return count() > number


@pytest.mark.slow  # three engines encode 600 texts: a minute of one core
def test_real_texts_have_the_same_bits_whatever_happens(
    new_cache_dir: Callable[[], Path], request: pytest.FixtureRequest
) -> None:
    """With `--reproducible-texts N` of more texts: those beyond the packaged docstrings repeat them with a number."""
    cache_dir = new_cache_dir()
    num_texts = request.config.getoption("--reproducible-texts") or NUM_TEXTS
    docstrings = [docstring.text for docstring in read_docstrings()]
    texts = [
        (docstrings[place % len(docstrings)] + f" {place}" * (place >= len(docstrings))).encode()
        for place in range(num_texts)
    ]
    first = encode_all(cache_dir, texts, 200, 1024)
    order = np.random.default_rng(3).permutation(len(texts))
    shuffled = [texts[place] for place in order]
    for num_workers in range(1, 1 + min(2, len(detect_inventory().physical_cores))):
        others = encode_all(cache_dir, shuffled, 37, 4096, num_workers=num_workers, num_kills=num_workers)
        assert [others[place] for place in np.argsort(order)] == first
