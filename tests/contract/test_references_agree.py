"""The reference of certificates is the same by transformers and sentence-transformers, for each pooling and layout."""

from pathlib import Path

import numpy as np
import pytest

from tests.classifiers import MAX_TOKENS, PAIRS, load_classifier, reference_logits, write_classifier
from tests.models import TEXTS, TinyModels, read_card, reference, smallest_cosine
from tests.reference import PROMPTED, known_vectors, packaged_reference
from tests.reference import TEXTS as KNOWN_TEXTS
from tests.rerankers import rank, write_cross_encoder, write_reranker
from tests.rerankers import read_card as read_reranker
from vectormill.domain.errors import ModelError
from vectormill.jobs.item import join_pair, split_pair
from vectormill.models.poolings import POOLING_NAMES
from vectormill.models.registry import EncodingOptions, make_spec
from worker.certificates.measuring import choose_library, make_texts
from worker.model import plain


@pytest.fixture(autouse=True)
def loads_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process load several models; outside of tests each has a process of its own."""
    monkeypatch.setattr(plain, "_loaded", [])


def test_the_stored_vectors_of_the_packaged_model_are_those_of_sentence_transformers() -> None:
    texts = [*KNOWN_TEXTS, *PROMPTED]
    found = packaged_reference().encode(texts, show_progress_bar=False)
    assert np.abs(found - known_vectors(texts)).max() < 1e-4


@pytest.mark.parametrize("library", ["transformers", "sentence-transformers"])
def test_every_pooling_has_the_reference_of_sentence_transformers(library: str, models: TinyModels) -> None:
    directory = models.sentence_transformer("+".join(POOLING_NAMES))
    card = read_card(directory)
    spec = make_spec(card, EncodingOptions())
    found = plain.encode_plainly(card, spec, library, [text.encode() for text in TEXTS])
    parts = zip(np.split(found, 6, axis=1), np.split(reference(directory), 6, axis=1), strict=True)
    for mode, (one, other) in zip(card.pooling, parts, strict=True):
        assert smallest_cosine(one, other) > 0.99999, mode


@pytest.mark.parametrize("library", ["transformers", "sentence-transformers"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_a_prompt_and_dense_modules_have_the_reference_of_sentence_transformers(
    include_prompt: bool, library: str, models: TinyModels
) -> None:
    directory = models.sentence_transformer("cls+weighted_mean", dense=True, include_prompt=include_prompt)
    card = read_card(directory)
    spec = make_spec(card, EncodingOptions(prompt="represent this: "))
    found = plain.encode_plainly(card, spec, library, [text.encode() for text in TEXTS])
    assert smallest_cosine(found, reference(directory, prompt=spec.prompt)) > 0.99999


def test_a_classifier_has_the_logits_of_transformers(tmp_path: Path) -> None:
    directory = write_classifier(tmp_path / "model", "bert")
    card = read_card(directory)
    spec = make_spec(card, EncodingOptions(activation="raw", max_tokens=MAX_TOKENS))
    pairs = [join_pair(first.encode(), second.encode()) for first, second in PAIRS]
    found = plain.encode_plainly(card, spec, "transformers", pairs)
    assert np.abs(found - reference_logits(directory)).max() < 1e-5


@pytest.mark.parametrize("layout", ["by name", "by modules"])
def test_a_reranker_has_the_scores_of_its_template(layout: str, tmp_path: Path) -> None:
    """Another tokenizer class, and the whole matrix of words, say what the engine says of two of its rows."""
    directory = (
        write_reranker(tmp_path, "Qwen3-Reranker-tiny")
        if layout == "by name"
        else write_cross_encoder(tmp_path, prompts={"fact": "Is it a fact?"})
    )
    card = read_reranker(directory)
    spec = make_spec(card, EncodingOptions(activation="raw", max_tokens=256))
    texts = make_texts(spec, 0)
    pairs = [split_pair(text) for text in texts]
    told = [(first.decode(), (second or b"").decode()) for first, second in pairs]
    scores, finished = rank(
        card, load_classifier(card, "torch", tmp_path), told, activation="raw", max_tokens=256
    )
    assert finished.truncated.any()
    assert not finished.failures
    found = plain.encode_plainly(card, spec, choose_library(card), texts)
    assert np.abs(found[:, 0] - scores).max() < 1e-3


def test_weights_that_transformers_would_invent_are_no_reference(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = read_card(models.transformer("Bert"))
    spec = make_spec(card, EncodingOptions())
    monkeypatch.setattr(plain, "UNUSED_WEIGHTS", ())
    from transformers import AutoModelForSequenceClassification

    monkeypatch.setattr("worker.model.plain.transformers.AutoModel", AutoModelForSequenceClassification)
    with pytest.raises(ModelError, match=r"finds no weights for classifier\."):
        plain.encode_plainly(card, spec, "transformers", [b"a"])
