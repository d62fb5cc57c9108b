"""Long texts in passages with the real model, against sentence-transformers' own modules on windows cut by hand."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.processors import with_bf16
from tests.reference import packaged_reference
from vectormill.domain.encoding import TRUNCATE, EncodingSpec
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.settings import WorkerSettings

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
SPEC = make_spec(CARD, EncodingOptions(max_tokens=64, long_texts="passages", passage_overlap=8))
SUBJECTS = (
    "Bread is made of flour, water, salt and yeast, and baked in an oven. ",
    "The stock market fell today, and bonds rose. ",
    "A glacier moves a few metres in a year. ",
)
LONG = "".join(sentence * 12 for sentence in SUBJECTS)
# As promised for a text in any company (docs/ARCHITECTURE.md).
SMALLEST_COSINES = {"fp32": 0.9999, "bf16": 0.999}
SHORT = "How do I bake bread?"


@pytest.fixture(scope="module", params=SMALLEST_COSINES)
def precision(request: pytest.FixtureRequest) -> str:
    """Both on every machine; a processor without bf16 instructions emulates them."""
    return str(request.param)


@pytest.fixture(scope="module")
def engine(new_cache_dir: Callable[[], Path], precision: str) -> Iterator[Engine]:
    # Nothing is reused: a passage that is encoded again in other company is to reach the model again.
    settings = WorkerSettings(reuse_bytes=0, precision=precision, backend="openvino")
    device = split_processor(detect_inventory(), 1)[0]
    engine = Engine(CARD, with_bf16(device), settings, new_cache_dir())
    engine.start()
    yield engine
    engine.stop()


def encode(engine: Engine, texts: list[str], spec: EncodingSpec = SPEC) -> EncodeResult:
    encoded = [text.encode() for text in texts]
    return engine.encode(EncodeRequest("r", spec, encoded, False, 1_000_000), threading.Event())


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def reference(text: str, prompt: str, max_tokens: int, overlap: int) -> NDArray[np.float32]:
    """The weighted mean by hand: windows of ids, through the model's own transformer and pooling, not normalized."""
    import torch

    model = packaged_reference()
    tokenizer = model.tokenizer
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    leading = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    room = max_tokens - 2 - len(leading)
    total, end, start = np.zeros(CARD.dimension), 0, 0
    while end < len(own):
        start = min(start, len(own) - room)
        ids = torch.tensor(
            [[tokenizer.cls_token_id, *leading, *own[start : start + room], tokenizer.sep_token_id]]
        )
        features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            pooled = model[1](model[0](features))["sentence_embedding"][0].numpy()
        total += pooled * (start + room - end)
        end, start = start + room, start + room - overlap
    assert end == len(own)
    return (total / len(own)).astype(np.float32)


@pytest.mark.parametrize("prompt", ["", "represent this: "])
def test_the_vector_of_a_long_text_is_the_token_weighted_mean_of_its_windows(
    engine: Engine, precision: str, prompt: str
) -> None:
    bound = SMALLEST_COSINES[precision]
    expected = reference(LONG, prompt, 64, 8)
    bare = encode(engine, [SHORT, LONG], replace(SPEC, prompt=prompt, normalize=False))
    assert cosine(bare.vectors[1], expected) >= bound
    if precision == "fp32":
        np.testing.assert_allclose(bare.vectors[1], expected, atol=1e-3 * float(np.abs(expected).max()))
    assert float(np.linalg.norm(bare.vectors[1]) / np.linalg.norm(expected)) == pytest.approx(1, abs=0.01)
    unit = encode(engine, [LONG], replace(SPEC, prompt=prompt))
    assert cosine(unit.vectors[0], expected) >= bound  # normalized once, behind the mean
    assert abs(float(np.linalg.norm(unit.vectors[0])) - 1) < 1e-5
    assert unit.num_passages == unit.num_tokens[0] / 64 >= 6


def test_a_text_that_fits_has_the_vector_that_it_has_when_long_ones_are_cut(
    engine: Engine, precision: str
) -> None:
    cut = encode(engine, [SHORT], replace(SPEC, long_texts=TRUNCATE, passage_overlap=0))
    assert np.array_equal(encode(engine, [SHORT]).vectors, cut.vectors)
    assert cosine(encode(engine, [SHORT, LONG]).vectors[0], cut.vectors[0]) >= SMALLEST_COSINES[precision]
