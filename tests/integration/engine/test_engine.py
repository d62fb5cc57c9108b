"""The engine with the real model, in its own process."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.batching.cost import LengthBuckets
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.settings import WorkerSettings

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
SPEC = make_spec(CARD, EncodingOptions())
TEXTS = [
    "How do I bake bread?",
    "Bread is made of flour, water, salt and yeast, and baked in an oven. " * 3,
    "The stock market fell today.",
    "Ein Satz auf Deutsch über das Wetter in den Bergen.",
    "x",
    "A very long text that goes on and on about nothing in particular. " * 40,
]


PACKED = {"backend": "auto", "attention": "packed"}  # on a processor torch alone can


@pytest.fixture(
    scope="module",
    params=[
        PACKED,
        pytest.param({"backend": "torch"}, marks=pytest.mark.slow),
        {"backend": "auto"},
    ],
    ids=str,
)
def engine(request: pytest.FixtureRequest, new_cache_dir: Callable[[], Path]) -> Iterator[Engine]:
    settings = WorkerSettings(**request.param, reuse_bytes=0)  # else a text alone is not computed at all
    device = split_processor(detect_inventory(), 1)[0]
    engine = Engine(CARD, device, settings, new_cache_dir())
    engine.start()
    yield engine
    engine.stop()


def encode(engine: Engine, texts: list[str], spec=SPEC, interactive: bool = False) -> EncodeResult:  # type: ignore[no-untyped-def]
    encoded = [text.encode() for text in texts]
    return engine.encode(EncodeRequest("r", spec, encoded, interactive, 1_000_000), threading.Event())


@pytest.mark.parametrize(("num_tokenizer_threads", "looks_words_up"), [(0, True), (8, False)])
def test_the_cores_that_a_gpu_leaves_decide_how_its_texts_are_tokenized(
    num_tokenizer_threads: int, looks_words_up: bool, new_cache_dir: Callable[[], Path]
) -> None:
    device = replace(split_processor(detect_inventory(), 1)[0], num_tokenizer_threads=num_tokenizer_threads)
    factory = "tests.faulty_engine:FaultyEncoder"  # what computes is no matter
    engine = Engine(CARD, device, WorkerSettings(), new_cache_dir(), factory=factory)
    engine.start()
    try:
        encode(engine, [text * 20 for text in TEXTS])
        assert (engine.report()["num_words"] > 0) is looks_words_up
    finally:
        engine.stop()


def test_a_text_has_the_same_vector_alone_and_in_any_company(engine: Engine) -> None:
    together = encode(engine, TEXTS)
    assert together.vectors.dtype == np.float32
    assert not together.failures
    assert together.truncated.tolist() == [False] * 5 + [True]
    for index, text in enumerate(TEXTS):
        assert float(encode(engine, [text]).vectors[0] @ together.vectors[index]) >= 0.9999
    with ThreadPoolExecutor(6) as threads:
        crowd = list(threads.map(lambda shift: encode(engine, TEXTS[shift:] + TEXTS[:shift]), range(6)))
    for shift, result in enumerate(crowd):
        rolled = np.roll(together.vectors, -shift, axis=0)
        assert float((result.vectors * rolled).sum(1).min()) >= 0.9999


def test_fewer_dimensions_are_the_leading_ones_at_unit_length(engine: Engine) -> None:
    whole = encode(engine, TEXTS[:2]).vectors[:, :64]
    cut = encode(engine, TEXTS[:2], replace(SPEC, dimensions=64)).vectors
    np.testing.assert_allclose(cut, whole / np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-5)
    assert cut.shape == (2, 64)


def test_a_packed_engine_computes_no_padding_and_says_that_it_is_packed(engine: Engine) -> None:
    encode(engine, TEXTS)
    report = engine.report()
    if not report["is_packed"]:
        assert report["attention"].startswith(("padded", "openvino"))
        return
    assert report["attention"] == "packed (vectormill_exact)"
    assert report["backend"] == {
        "value": "torch",
        "reason": "openvino does not support packed attention, which was requested",
    }
    assert report["num_computed_tokens"] == report["num_tokens"]


def test_what_a_text_is_computed_with_beyond_its_tokens_is_counted_as_padding(engine: Engine) -> None:
    longest = engine.report()["longest_bucket"]
    assert (longest is not None) == (engine.report()["backend"]["value"] == "openvino")
    for num_words in (10, 40, 70, 133):
        alone = encode(engine, ["word " * num_words])
        num_tokens = int(alone.num_tokens[0])
        expected = num_tokens if longest is None else LengthBuckets(longest).find(num_tokens)
        assert alone.num_computed_tokens == expected
