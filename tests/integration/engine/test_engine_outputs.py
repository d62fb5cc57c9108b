"""The engine computes what each request asks for, also where requests that ask for different outputs share a batch."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks.random_embedder import SMALL, write_random_embedder
from tests.models import TEXTS, packaged_model, read_card
from vectormill.models.registry import EncodingOptions, make_spec
from vectormill.ragged import Ragged
from vectormill.vectors.representations import Representations, unpack
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.settings import WorkerSettings

ALL = "dense,sparse,multi_vector"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, new_cache_dir: Callable[[], Path]) -> Iterator[Engine]:
    model = write_random_embedder(SMALL, packaged_model(), tmp_path_factory.mktemp("m3") / "m")
    device = split_processor(detect_inventory(), 1)[0]
    engine = Engine(read_card(model), device, WorkerSettings(), new_cache_dir())
    engine.start()
    yield engine
    engine.stop()


def encode(engine: Engine, texts: list[str], outputs: str) -> EncodeResult:
    spec = make_spec(engine._card, EncodingOptions(outputs=outputs))
    encoded = [text.encode() for text in texts]
    return engine.encode(EncodeRequest(outputs, spec, encoded, False, 1_000_000), threading.Event())


def read(results: Ragged) -> list[Representations]:
    assert results.values.dtype == np.uint8
    return [unpack(results.row(index).tobytes()) for index in range(len(results))]


def test_requests_that_ask_for_different_outputs_share_batches(engine: Engine) -> None:
    dense = encode(engine, TEXTS, "dense").vectors
    again = [f"{text} {number}" for number in range(3) for text in TEXTS]  # of which no vector is known
    with ThreadPoolExecutor(4) as threads:
        wishes = ("dense", ALL, "sparse", "dense,multi_vector")
        found = dict(zip(wishes, threads.map(lambda wish: encode(engine, again, wish), wishes), strict=True))
    assert engine.report()["num_restarts"] == 0
    whole = read(found[ALL].results)
    some = {wish: read(found[wish].results) for wish in ("sparse", "dense,multi_vector")}
    for index, each in enumerate(whole):
        np.testing.assert_allclose(each.dense, found["dense"].vectors[index], atol=0.02)  # 16 bits
        sparse, others = some["sparse"][index], some["dense,multi_vector"][index]
        assert not len(sparse.dense) + len(sparse.vectors) + len(others.indices)
        assert len(others.vectors) == found[ALL].num_tokens[index] - 1
        np.testing.assert_allclose(others.vectors, each.vectors, atol=0.03)
        assert len(set(sparse.indices.tolist()) ^ set(each.indices.tolist())) <= 2
    # A vector that is known for a dense request is no answer to another one.
    known = read(encode(engine, TEXTS, ALL).results)
    np.testing.assert_allclose([each.dense for each in known], dense, atol=0.02)
    assert all(len(each.vectors) for each in known)


def test_a_text_that_fails_has_an_empty_row(engine: Engine) -> None:
    found = encode(engine, ["sound", "", "also sound"], ALL)
    assert list(found.failures) == [1]
    assert found.results.lengths.tolist()[1] == 0
    assert len(unpack(found.results.row(2).tobytes()).vectors) == 3
