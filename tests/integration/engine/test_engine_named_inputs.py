"""What a model reads has names, and what it answers any length: two inputs and bytes, through processes and batches."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faulty_engine import CARD, SPEC, encode, making_engines
from tests.two_inputs import TypedTokenizer, answer, type_of, weigh
from vectormill.domain.encoding import PASSAGES
from vectormill.domain.errors import ModelError
from vectormill.jobs.item import EMPTY_TEXT, ENCODING_FAILED, NON_FINITE_VECTOR
from worker.engine.engine import Engine
from worker.engine.request import EncodeResult
from worker.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(CARD.path, lowercase=CARD.lowercase)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr("worker.tasks.table.Tokenizer", TypedTokenizer)
    with making_engines(tmp_path) as make:
        started = make("tests.two_inputs:load_answering_encoder", reuse_bytes=1 << 20)
        started.start()
        yield started


def expected(text: str) -> bytes:
    ids = TOKENIZER.tokenize([text], SPEC.max_tokens, truncate=True).ids(0)
    return answer(ids, type_of(ids))


def answers(result: EncodeResult) -> list[bytes]:
    return [result.results.row(index).tobytes() for index in range(len(result.results))]


def test_every_text_gets_its_own_answer_whatever_its_length(engine: Engine) -> None:
    texts = [[f"request {r} text {i} " + "word " * (i % 9) for i in range(60)] for r in range(4)]
    texts[0][7] = texts[0][3]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda some: encode(engine, some), texts))
    for some, result in zip(texts, results, strict=True):
        assert not result.failures
        assert answers(result) == [expected(text) for text in some]
    assert len({len(each) for each in answers(results[0])}) > 5
    assert results[0].num_reused == 1, (
        "a text that occurs twice is encoded once, and vectors alone are remembered"
    )


def test_a_text_without_an_answer_fails_alone_and_has_no_bytes(engine: Engine) -> None:
    texts = ["fine", " ", "an error here", "also fine"]
    result = encode(engine, texts)
    assert {index: failure.code for index, failure in result.failures.items()} == {
        1: EMPTY_TEXT,
        2: ENCODING_FAILED,
    }
    assert answers(result) == [expected("fine"), b"", b"", expected("also fine")]
    assert result.num_tokens.tolist() == [3, 0, 0, 4]
    assert answers(encode(engine, ["fine"])) == [expected("fine")]


def test_answers_of_passages_cannot_be_joined_which_is_said(engine: Engine) -> None:
    spec = replace(SPEC, long_texts=PASSAGES, max_tokens=8, passage_overlap=1)
    assert answers(encode(engine, ["short enough"], spec=spec)) == [expected("short enough")]
    with pytest.raises(ModelError, match="long_texts"):
        encode(engine, ["one two three four five six seven eight nine"], spec=spec)


def test_numbers_of_any_length_are_handed_on_as_they_are(tmp_path: Path) -> None:
    texts = ["one", "a longer one", " ", "an error here", "two", "one", "a much longer one of many words"]
    with making_engines(tmp_path) as make:
        engine = make("tests.two_inputs:load_weighing_encoder", reuse_bytes=1 << 20)
        engine.start()
        normalized = replace(SPEC, normalize=True)  # vectors would be
        result = encode(engine, texts, spec=normalized)
        assert encode(engine, ["one"]).results.row(0).tolist() == result.results.row(0).tolist()
    codes = {index: failure.code for index, failure in result.failures.items()}
    assert codes == {2: EMPTY_TEXT, 3: NON_FINITE_VECTOR}
    for index, text in enumerate(texts):
        ids = TOKENIZER.tokenize([text], SPEC.max_tokens, truncate=True).ids(0)
        expected = [] if index in codes else weigh(ids).tolist()
        assert result.results.row(index).tolist() == expected, text
    with pytest.raises(ValueError, match="different lengths"):
        _ = result.vectors


def test_an_encoder_whose_vectors_are_none_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    with making_engines(tmp_path) as make:
        engine = make("tests.two_inputs:load_boastful_encoder")
        with pytest.raises(
            ModelError, match=rf"have \d+ values, and vectors of this model have {CARD.dimension}"
        ):
            engine.start()
