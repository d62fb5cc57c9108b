"""Passages read in their whole texts have the vectors that the authors of late chunking compute.

The reference is their way, written out with transformers in eager fp32: the states of all tokens of one text, and the
mean of them over each passage (`chunked_pooling` and `_extend_special_tokens` of github.com/jina-ai/late-chunking). A
text beyond the window is read in overlapping windows, of which the left one gives the states of an overlap (algorithm 2
of arXiv 2409.04701); here each window has special tokens and the prompt, and the last ends with the text.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from tests.models import BACKENDS, DEVICE, SENTENCES, read_card, write_sentence_transformer, write_transformer
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import ModelError
from vectormill.jobs.item import EMPTY_TEXT, PASSAGE_NOT_FOUND, join_pair
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import EncodingOptions, make_spec
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.settings import WorkerSettings

WINDOW: Final = 48
OVERLAP: Final = 10
PROMPT: Final = "search document, of a manual: "
# Texts of less than a window, and of several.
DOCUMENTS: Final = [
    "  " + SENTENCES[0] + "\n\n" + SENTENCES[1],
    "\n\n".join(SENTENCES[2:12]),
    "Ünïcödé words. " + " ".join(SENTENCES[12:40]) + "\n",
    SENTENCES[40],
    " ".join([SENTENCES[41]] * 3),
]
Span = tuple[int, int]


def cut(document: str, seed: int) -> list[Span]:
    """Return spans of characters, most of them one after another without the blanks between them, some overlapping."""
    numbers = np.random.default_rng(seed)
    words = [place for place, char in enumerate(document) if char.isspace()]
    bounds = [
        0,
        *sorted(numbers.choice(words, size=min(4, len(words)), replace=False).tolist()),
        len(document),
    ]
    spans = list(pairwise(bounds))
    spans += [(start, end) for start, _, end in zip(bounds, bounds[1:], bounds[2:], strict=False)][:2]
    stripped = []
    for start, end in spans:
        text = document[start:end]
        if text.strip():
            blanks = len(text) - len(text.lstrip())
            stripped.append((start + blanks, start + blanks + len(text.strip())))
    return stripped


def make_item(document: str, span: Span) -> bytes:
    """Return the pair of a passage and its text, in which the place is marked if it is not the first."""
    start, end = span
    marked = (
        document
        if document.find(document[start:end]) == start
        else f"{document[:start]}\x1e{document[start:]}"
    )
    return join_pair(document[start:end].encode(), marked.encode())


class Authors:
    """The states and spans of tokens as the authors' code has them."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(card.path)
        kind: Any = transformers.AutoModel
        self.network = kind.from_pretrained(
            card.path, attn_implementation="eager", dtype=torch.float32
        ).eval()

    def encode(self, document: str, spans: Sequence[Span], spec: EncodingSpec) -> NDArray[np.float32]:
        given = self.tokenizer(spec.prompt + document, return_offsets_mapping=True, truncation=False)
        states = self.find_states(given["input_ids"], spec)
        places = given["offset_mapping"]
        own = range(1, len(places) - 1)
        texts = [place for place in own if places[place][1] > len(spec.prompt)]
        vectors = []
        for start, end in spans:
            first, last = len(spec.prompt) + start, len(spec.prompt) + end
            tokens = [place for place in own if places[place][1] > first and places[place][0] < last]
            left, right = tokens[0], tokens[-1] + 1
            if tokens[0] == texts[0]:  # the first passage has the special token and the instruction before it
                left = 0 if self.card.include_prompt or not spec.prompt else texts[0]
            if tokens[-1] == texts[-1]:
                right = len(places)
            vectors.append(states[left:right].sum(dim=0) / (right - left))
        found: NDArray[np.float32] = torch.stack(vectors).numpy()
        return found

    @torch.inference_mode()
    def find_states(self, ids: list[int], spec: EncodingSpec) -> torch.Tensor:
        """Return the states of all tokens, each from the first window that has it."""
        if len(ids) <= spec.max_tokens:
            return self.read(ids)
        num_leading = len(self.tokenizer(spec.prompt)["input_ids"]) - 1
        leading, words, after = ids[:num_leading], ids[num_leading:-1], ids[-1:]
        room = spec.max_tokens - num_leading - 1
        states = self.read([*leading, *words[:room], *after])
        parts = [states[: num_leading + room]]
        num_known = room
        while num_known < len(words):
            start = min(num_known - spec.passage_overlap, len(words) - room)
            states = self.read([*leading, *words[start : start + room], *after])
            parts.append(states[num_leading + num_known - start : num_leading + room])
            num_known = start + room
        return torch.cat([*parts, states[-1:]])

    def read(self, ids: list[int]) -> torch.Tensor:
        states: torch.Tensor = self.network(torch.tensor([ids]))[0][0]
        return states


@pytest.fixture(scope="module", params=[True, False], ids=["with prompt", "without prompt"])
def card(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = tmp_path_factory.mktemp("model")
    transformer = write_transformer(folder / "transformer", "Bert")
    path = write_sentence_transformer(folder / "whole", transformer, "mean", include_prompt=request.param)
    return read_card(path)


@pytest.fixture(scope="module", params=BACKENDS)
def engine(
    request: pytest.FixtureRequest, card: ModelCard, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    backend, _, attention = request.param.partition(", ")
    settings = WorkerSettings(precision="fp32", backend=backend, attention=attention or "auto")
    engine = Engine(card, DEVICE, settings, tmp_path_factory.mktemp("cache"))
    engine.start()
    yield engine
    engine.stop()


def make_late(card: ModelCard, prompt: str = "") -> EncodingSpec:
    return make_spec(
        card,
        EncodingOptions(
            long_texts="late", max_tokens=WINDOW, passage_overlap=OVERLAP, prompt=prompt, normalize=False
        ),
    )


def encode(engine: Engine, spec: EncodingSpec, items: Sequence[bytes]) -> EncodeResult:
    return engine.encode(EncodeRequest("r", spec, items, False, 1_000_000), threading.Event())


def smallest_cosine(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(axis=1) / lengths).min())


@pytest.mark.parametrize("prompt", ["", PROMPT])
def test_passages_have_the_vectors_of_the_authors_alone_and_with_neighbours(
    engine: Engine, card: ModelCard, prompt: str
) -> None:
    spec, authors = make_late(card, prompt), Authors(card)
    spans = {document: cut(document, place) for place, document in enumerate(DOCUMENTS)}
    items = [make_item(document, span) for document, own in spans.items() for span in own]
    expected = np.concatenate([authors.encode(document, own, spec) for document, own in spans.items()])
    together = encode(engine, spec, items)
    assert not together.failures
    assert smallest_cosine(together.vectors, expected) > 0.99999
    np.testing.assert_allclose(together.vectors, expected, rtol=0, atol=1e-4)
    assert together.num_passages > 0
    alone = np.concatenate([encode(engine, spec, [item]).vectors for item in items])
    assert smallest_cosine(alone, expected) > 0.99999
    backwards = encode(engine, spec, items[::-1]).vectors[::-1]
    assert smallest_cosine(backwards, expected) > 0.99999


def test_passages_and_texts_of_other_jobs_share_batches_and_keep_their_vectors(
    engine: Engine, card: ModelCard
) -> None:
    late, bare = make_late(card), make_spec(card, EncodingOptions(max_tokens=WINDOW, normalize=False))
    items = [make_item(document, span) for document in DOCUMENTS for span in cut(document, 7)]
    texts = [sentence.encode() for sentence in SENTENCES[:40]]
    expected = encode(engine, late, items).vectors, encode(engine, bare, texts).vectors
    with ThreadPoolExecutor(6) as pool:
        jobs = [
            pool.submit(
                encode, engine, spec, [f"{turn}".encode() + given for given in own] if own is texts else own
            )
            for turn in range(6)
            for spec, own in ((late, items), (bare, texts))
        ]
        found = [job.result() for job in jobs]
    for result in found[::2]:
        assert smallest_cosine(result.vectors, expected[0]) > 0.99999
    assert not any(result.failures for result in found)
    assert smallest_cosine(encode(engine, bare, texts).vectors, expected[1]) > 0.99999


def test_a_text_that_is_one_passage_has_the_vector_of_a_text(engine: Engine, card: ModelCard) -> None:
    bare = make_spec(card, EncodingOptions(max_tokens=WINDOW, normalize=False))
    texts = [sentence.encode() for sentence in SENTENCES[:20]]
    expected = encode(engine, bare, texts).vectors
    late = make_late(card)
    assert smallest_cosine(encode(engine, late, texts).vectors, expected) > 0.99999
    pairs = encode(engine, late, [join_pair(text, b"\n" + text + b" ") for text in texts])
    assert smallest_cosine(pairs.vectors, expected) > 0.99999
    assert pairs.num_tokens.tolist() == encode(engine, bare, texts).num_tokens.tolist()


def test_equal_passages_differ_by_their_texts_and_by_their_marked_places(
    engine: Engine, card: ModelCard
) -> None:
    passage, text = b"It was late.", b"It was late. We went home. It was late."
    marked = b"It was late. We went home. \x1eIt was late."
    others = [join_pair(passage, whole) for whole in (text, marked, b"The bus came. It was late.", passage)]
    vectors = encode(engine, make_late(card), others).vectors
    assert len({vector.tobytes() for vector in vectors}) == len(others)


def test_a_passage_that_cannot_be_read_fails_alone(engine: Engine, card: ModelCard) -> None:
    text = SENTENCES[0].encode()
    good = join_pair(text[:9].strip(), text)
    items = [good, join_pair(b"not there", text), join_pair(b" ", text), join_pair(text, b"\xc3")]
    found = encode(engine, make_late(card), items)
    assert {place: failure.code for place, failure in found.failures.items()} == {
        1: PASSAGE_NOT_FOUND,
        2: EMPTY_TEXT,
        3: "lone_surrogate",
    }
    alone = encode(engine, make_late(card), [good])
    assert smallest_cosine(found.vectors[:1], alone.vectors) > 0.99999
    assert encode(engine, make_late(card), items[1:]).failures.keys() == {0, 1, 2}


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_a_reproducible_worker_gives_a_passage_the_same_bits_in_any_batch(
    card: ModelCard, backend: str, tmp_path: Path
) -> None:
    settings = WorkerSettings(precision="fp32", backend=backend, reproducible=True, reuse_bytes=0)
    engine = Engine(card, DEVICE, settings, tmp_path)
    engine.start()
    try:
        spec, bare = make_late(card), make_spec(card, EncodingOptions(max_tokens=WINDOW))
        items = [make_item(document, span) for document in DOCUMENTS for span in cut(document, 3)]
        texts = [sentence.encode() for sentence in SENTENCES[:5]]
        before = encode(engine, bare, texts).vectors.tobytes()
        together = encode(engine, spec, items).vectors
        for item, vector in zip(items, together, strict=True):
            assert encode(engine, spec, [item]).vectors[0].tobytes() == vector.tobytes()
        assert encode(engine, bare, texts).vectors.tobytes() == before
    finally:
        engine.stop()


def test_an_older_worker_takes_the_spec_for_another_models(engine: Engine, card: ModelCard) -> None:
    unknown = replace(make_late(card), pooling="mean/later")
    with pytest.raises(ModelError, match="needs the model"):
        encode(engine, unknown, [b"text"])
