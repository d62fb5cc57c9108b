"""Results of any length: weights of words from real processes with a fake encoder, and vectors that are none."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.faulty_engine import CARD, ERROR, SPEC, encode, making_engines
from vectormill.domain.encoding import LATE, LATE_POOLING, PASSAGES
from vectormill.domain.errors import ModelError
from vectormill.jobs.item import EMPTY_TEXT, NON_FINITE_VECTOR
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import Choice, DirectEncoder, EncoderOrder, EncoderReport
from worker.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(CARD.path, lowercase=CARD.lowercase)


class WeighingEncoder(DirectEncoder):
    """Answers with the ids of inner tokens as weights, as a sparse model does: equally long for hardly two texts."""

    def __init__(self, order: EncoderOrder, *, gives_vectors: bool = False) -> None:
        self._gives_vectors = gives_vectors

    def encode(self, batch: Batch) -> Ragged:
        ids = batch.inputs["input_ids"]
        return Ragged.from_rows([weigh(ids.row(index)) for index in range(len(batch))], np.float32)

    def describe(self) -> EncoderReport:
        choice = Choice("fake", "for tests")
        return EncoderReport(choice, choice, choice, "none", 1, 0.0, gives_vectors=self._gives_vectors)


def weigh(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    return np.where(ids == ERROR, np.nan, ids)[1:-1].astype(np.float32)


load_boastful_encoder = partial(WeighingEncoder, gives_vectors=True)


def test_numbers_of_any_length_are_handed_on_as_they_are(tmp_path: Path) -> None:
    texts = ["one", "a longer one", " ", "an error here", "two", "one", "a much longer one of many words"]
    passages = replace(SPEC, long_texts=PASSAGES, max_tokens=8, passage_overlap=1)
    with making_engines(tmp_path) as make:
        engine = make(f"{__name__}:WeighingEncoder", reuse_bytes=1 << 20)
        engine.start()
        result = encode(engine, texts, spec=replace(SPEC, normalize=True))  # vectors would be
        assert encode(engine, ["one"]).results.row(0).tolist() == result.results.row(0).tolist()
        assert not encode(engine, ["short enough"], spec=passages).failures
        with pytest.raises(ModelError, match="long_texts"):  # such results of passages cannot be joined
            encode(engine, ["one two three four five six seven eight nine"], spec=passages)
        late = replace(passages, long_texts=LATE, pooling=LATE_POOLING)
        with pytest.raises(ModelError, match="gives no states of tokens"):
            encode(engine, ["short enough"], spec=late)
    codes = {index: failure.code for index, failure in result.failures.items()}
    assert codes == {2: EMPTY_TEXT, 3: NON_FINITE_VECTOR}
    assert result.num_reused == 1, "a text that occurs twice; vectors alone are remembered"
    for index, text in enumerate(texts):
        ids = TOKENIZER.tokenize([text], SPEC.max_tokens, truncate=True).ids(0)
        expected = [] if index in codes else weigh(ids).tolist()
        assert result.results.row(index).tolist() == expected, text
    with pytest.raises(ValueError, match="different lengths"):
        _ = result.vectors


def test_an_encoder_whose_vectors_are_none_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    with making_engines(tmp_path) as make:
        engine = make(f"{__name__}:load_boastful_encoder")
        with pytest.raises(
            ModelError, match=rf"have \d+ values, and vectors of this model have {CARD.dimension}"
        ):
            engine.start()
