"""Pairs through the whole engine: by StructBERT as its reference judges them, and by the cosine of two vectors."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.classifiers import STRUCTBERT
from tests.models import DEVICE, packaged_model, read_card
from vectormill.domain.encoding import EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.jobs.item import join_pair
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import make_spec
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.settings import WorkerSettings

CASES = [
    case
    for case in json.loads((STRUCTBERT / "cases.json").read_text(encoding="utf-8"))["cases"]
    if case["text_a"].strip() and (case["text_b"] is None or case["text_b"].strip())
]
TEXTS = [
    case["text_a"].encode()
    if case["text_b"] is None
    else join_pair(case["text_a"].encode(), case["text_b"].encode())
    for case in CASES
]
CARD = read_card(STRUCTBERT / "model")
MINILM = read_card(packaged_model())


def start(card: ModelCard, cache_dir: Path, backend: str) -> Iterator[Engine]:
    engine = Engine(card, DEVICE, WorkerSettings(backend=backend, precision="fp32", threads=1), cache_dir)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module", params=["torch", "openvino"])
def structbert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from start(CARD, tmp_path_factory.mktemp("cache"), request.param)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from start(MINILM, tmp_path_factory.mktemp("cache"), "torch")


def judge(engine: Engine, spec: EncodingSpec, texts: list[bytes]) -> EncodeResult:
    return engine.encode(EncodeRequest("r", spec, texts, False, 10_000), threading.Event())


def test_structbert_gives_the_probabilities_of_its_reference(structbert: Engine) -> None:
    spec = make_spec(CARD, EncodingOptions())
    assert (spec.task, spec.labels, spec.activation, spec.dimensions) == ("score", ("0", "1"), "softmax", 2)
    expected = np.array([case["max_length_512"]["probs"] for case in CASES])
    together = judge(structbert, spec, TEXTS)
    assert not together.failures
    assert np.abs(together.results.matrix - expected).max() < 2e-5
    alone = np.concatenate([judge(structbert, spec, [text]).results.matrix for text in TEXTS])
    assert np.abs(alone - expected).max() < 2e-5
    assert together.num_tokens.tolist() == [case["max_length_512"]["num_tokens"] for case in CASES]


def test_a_model_that_embeds_gives_the_cosine_and_reads_each_text_once(minilm: Engine) -> None:
    spec = make_spec(MINILM, EncodingOptions(task="score"))
    sides = [
        "a cat sat on the mat",
        "a feline rested on a rug",
        "interest rates rose again",
        "the bank lends money",
    ]
    pairs = [(first, second) for first in sides for second in sides]
    found = judge(minilm, spec, [join_pair(first.encode(), second.encode()) for first, second in pairs])
    vectors = judge(minilm, make_spec(MINILM, EncodingOptions()), [side.encode() for side in sides]).vectors
    expected = (vectors @ vectors.T).reshape(-1, 1)
    assert np.abs(found.results.matrix - expected).max() < 1e-5
    assert found.results.matrix[1] > found.results.matrix[2]
    lone = judge(minilm, spec, [b"no second text", join_pair(b"a", b"\xed\xa0\x80")])
    assert {index: failure.code for index, failure in lone.failures.items()} == {
        0: "no_pair",
        1: "lone_surrogate",
    }


@pytest.mark.parametrize(
    ("card", "options", "message"),
    [
        (CARD, EncodingOptions(task="embed"), "supports the task score, not embed"),
        (CARD, EncodingOptions(dimensions=1), "dimensions has no effect"),
        (CARD, EncodingOptions(long_texts="passages"), "applies to whole texts"),
        (CARD, EncodingOptions(long_texts="late"), "applies to whole texts"),
        (
            replace(MINILM, pooling=("cls",)),
            EncodingOptions(long_texts="late"),
            "takes the mean of a passage's",
        ),
        (CARD, EncodingOptions(max_tokens=5), "max_tokens must be from 6"),
        (MINILM, EncodingOptions(task="score", activation="sigmoid"), "activation has no effect"),
        (MINILM, EncodingOptions(activation="sigmoid"), "omit it"),
        (MINILM, EncodingOptions(task="classify"), "task must be one of embed, score"),
    ],
)
def test_options_that_would_decide_nothing_are_refused(
    card: ModelCard, options: EncodingOptions, message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        make_spec(card, options)
