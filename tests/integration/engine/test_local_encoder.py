"""LocalEncoder: the vectors of a job without a service, and reasons for texts that have none."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import worker.local
from tests.faulty_engine import runner_pids
from tests.reference import TEXTS, known_vectors
from vectormill.domain.errors import InvalidOption, ModelError
from vectormill.vectors.quantization import pack_signs
from worker.engine.engine import Engine
from worker.local import LocalEncoder


@pytest.fixture
def in_own_folder(new_cache_dir: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep converted models in the folder of this test run, as the settings of the environment say."""
    monkeypatch.setenv("VECTORMILL_CACHE_DIR", str(new_cache_dir()))


@pytest.mark.usefixtures("in_own_folder")
def test_vectors_are_those_of_the_reference_in_order_and_a_faulty_text_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker.local, "GROUP_TEXTS", 16)
    faulty = {1: None, 5: math.nan, 20: "  ", 40: "a NUL\0here", 60: "\ud800"}
    texts = [faulty.get(place, text) for place, text in enumerate(TEXTS)]
    with LocalEncoder() as encoder:
        found = encoder.encode(texts)
        again = encoder.encode(texts[:1])
        assert encoder.encode([]).vectors.shape == (0, 384)
    assert found.vectors.dtype == np.float32
    codes = {place: failure.code for place, failure in found.failures.items()}
    assert codes == {
        1: "empty_text",
        5: "empty_text",
        20: "empty_text",
        40: "nul_character",
        60: "lone_surrogate",
    }
    assert np.flatnonzero(np.isnan(found.vectors).all(axis=1)).tolist() == list(faulty)
    sound = [place for place in range(len(texts)) if place not in faulty]
    expected = known_vectors()[sound]
    assert (found.vectors[sound] * expected).sum(axis=1).min() > 0.9999
    assert (again.vectors[0] @ expected[0]) > 0.9999
    assert (found.num_tokens[sound] > 2).all()
    assert not found.num_tokens[list(faulty)].any()
    assert found.reasons()[0] is None
    assert str(found.reasons()[1]).startswith("empty_text: ")
    assert runner_pids() == []
    with pytest.raises(ModelError, match="closed"):
        encoder.encode(TEXTS[:1])


@pytest.mark.usefixtures("in_own_folder")
@pytest.mark.parametrize(
    ("vector_type", "dtype", "width"),
    [("float16", np.float16, 64), ("int8", np.int8, 64), ("binary", np.uint8, 8)],
)
def test_a_vector_type_and_dimensions_are_those_of_the_options(
    vector_type: str, dtype: type, width: int
) -> None:
    with LocalEncoder(dimensions=64, vector_type=vector_type) as encoder:
        found = encoder.encode([*TEXTS, ""])
    assert found.vectors.dtype == dtype
    assert found.vectors.shape == (len(TEXTS) + 1, width)
    assert list(found.failures) == [len(TEXTS)]
    expected = known_vectors()[:, :64]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    if vector_type == "binary":
        assert (np.unpackbits(found.vectors[:-1] ^ pack_signs(expected), axis=1).mean()) < 0.01
        assert not found.vectors[-1].any()
    elif vector_type == "int8":
        assert not found.vectors[-1].any()
        nearest = np.argsort(-(expected @ expected.T), axis=1)[:, 1]
        codes = found.vectors[:-1].astype(np.float32)
        codes /= np.linalg.norm(codes, axis=1, keepdims=True)
        assert (codes * codes[nearest]).sum(axis=1).mean() > 0.5
    else:
        assert (found.vectors[:-1] * expected).sum(axis=1).min() > 0.999
        assert np.isnan(found.vectors[-1]).all()


def test_a_text_that_ends_the_model_process_fails_alone_and_the_others_have_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VECTORMILL_CACHE_DIR", str(tmp_path))
    # Fewer deaths in a row than the search for the text takes.
    monkeypatch.setenv("VECTORMILL_WORKER_MAX_RUNNER_RESTARTS", "1")
    faulty = partial(Engine, factory="tests.faulty_engine:FaultyEncoder")
    monkeypatch.setattr(worker.local, "Engine", faulty)
    texts = ["crash", *(f"text {number}" for number in range(7)), "error"]
    with LocalEncoder(normalize=False) as encoder:
        found = encoder.encode(texts)
        assert encoder.is_healthy()
    codes = {place: failure.code for place, failure in found.failures.items()}
    assert codes == {0: "crashed_worker", 8: "encoding_failed"}
    assert np.isfinite(found.vectors[1:8]).all()
    assert np.isnan(found.vectors[[0, 8]]).all()


def test_an_engine_that_has_ended_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VECTORMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("VECTORMILL_WORKER_MAX_RUNNER_RESTARTS", "0")
    monkeypatch.setattr(worker.local, "Engine", partial(Engine, factory="tests.faulty_engine:FaultyEncoder"))
    with LocalEncoder() as encoder:
        with pytest.raises(ModelError, match="was lost 1 times in a row"):
            encoder.encode(["crash", "text"])
        assert not encoder.is_healthy()


def test_what_gives_no_vectors_is_refused_before_anything_is_started() -> None:
    with pytest.raises(InvalidOption, match="gives scores"):
        LocalEncoder(task="score")
    assert runner_pids() == []
