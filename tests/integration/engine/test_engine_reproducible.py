"""A reproducible worker gives real texts the same bits in other batches and orders, and if its model process dies."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_engine import runner_pids
from tests.waiting import wait_for
from vectormill.corpus import read_docstrings
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest
from worker.settings import WorkerSettings

NUM_TEXTS = 600


def encode_all(
    cache_dir: Path, texts: list[bytes], part_texts: int, max_batch_tokens: int, *, kill: bool = False
) -> list[bytes]:
    """Return the bits of each text's vector, encoded in requests of `part_texts`, several at a time."""
    card = Registry({}).card(DEFAULT_MODEL)
    settings = WorkerSettings(reproducible=True, reuse_bytes=0, max_batch_tokens=max_batch_tokens)
    engine = Engine(card, split_processor(detect_inventory(), 1)[0], settings, cache_dir)
    spec = make_spec(card, EncodingOptions())

    def encode(start: int) -> list[bytes]:
        part = texts[start : start + part_texts]
        request = EncodeRequest(str(start), spec, part, False, 1_000_000)
        return [row.tobytes() for row in engine.encode(request, threading.Event()).vectors]

    engine.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            parts = threads.map(encode, range(0, len(texts), part_texts))
            if kill:
                wait_for(lambda: engine._executor._in_flight.started)
                os.kill(runner_pids()[0], signal.SIGKILL)
            found = [row for part in parts for row in part]
        assert engine.report()["num_restarts"] == kill
    finally:
        engine.stop()
    return found


@pytest.mark.tail
def test_real_texts_have_the_same_bits_whatever_happens(new_cache_dir: Callable[[], Path]) -> None:
    cache_dir = new_cache_dir()
    texts = [docstring.text.encode() for docstring in islice(read_docstrings(), NUM_TEXTS)]
    first = encode_all(cache_dir, texts, 200, 1024)
    order = np.random.default_rng(3).permutation(len(texts))
    second = encode_all(cache_dir, [texts[place] for place in order], 37, 4096, kill=True)
    assert [second[place] for place in np.argsort(order)] == first
