"""A generative reranker reads and scores a pair as its authors' code does: alone, in batches, whole and cut.

FlagEmbedding and mxbai-rerank are not installed here: tests/data/rerankers says what they compute with these weights.
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.classifiers import load_classifier, write_classifier
from tests.models import PACKED
from tests.rerankers import (
    CHAT,
    DATA,
    MAX_TOKENS,
    PAIRS,
    QWEN3,
    rank,
    read_card,
    write_cross_encoder,
    write_reranker,
)
from tests.rounds import ask, finish
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import InvalidOption, ModelError, UnsupportedModel
from vectormill.domain.task import JUDGE
from vectormill.jobs.item import NO_PAIR, TOO_MANY_TOKENS
from vectormill.models.model_card import ModelCard
from vectormill.models.rerankers import RERANKERS
from vectormill.models.specs import find_kind, make_spec
from vectormill.ragged import Ragged
from worker.encoder.encoder import Encoder
from worker.model.heads import load_head
from worker.tasks.score import tokenize_worded
from worker.tasks.table import make_tasks
from worker.tokens.tokenized import TokenizedTexts
from worker.tokens.tokenizer import Tokenizer

GOLDEN: dict[str, list[dict[str, Any]]] = json.loads((DATA / "cases.json").read_text(encoding="utf-8"))[
    "cases"
]
BACKENDS = ("torch", pytest.param(PACKED, id="packed"), "openvino")
GEMMA2 = "reranker-of-gemma2"
EACH_ALONE = [[index] for index in range(len(PAIRS))]


def load(card: ModelCard, backend: str, cache_dir: Path) -> Encoder:
    attention = "packed" if backend == PACKED else "auto"
    encoder = load_classifier(card, backend.partition(",")[0], cache_dir, attention)
    assert encoder.describe().is_packed == (backend == PACKED)
    return encoder


def read(card: ModelCard, prompt: str | None, max_tokens: int, pairs: Any = PAIRS) -> TokenizedTexts:
    assert card.classifier is not None
    assert card.classifier.template is not None
    told = card.default_prompt if prompt is None else prompt
    return tokenize_worded(Tokenizer(card.path), card.classifier.template, told, pairs, max_tokens, True)


@pytest.mark.parametrize("family", GOLDEN)
def test_the_tokens_of_a_pair_are_those_of_the_authors_package(family: str, tmp_path: Path) -> None:
    card = read_card(write_reranker(tmp_path, family))
    num_cut = 0
    for case in GOLDEN[family]:
        [ids] = [read(card, case["prompt"], MAX_TOKENS, [case["pair"]]).ids(0).tolist()]
        if len(case["ids"]) < len(ids):
            cut = read(card, case["prompt"], len(case["ids"]), [case["pair"]])
            assert cut.truncated.all()
            ids, num_cut = cut.ids(0).tolist(), num_cut + 1
        assert ids == case["ids"], case
    assert num_cut == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", GOLDEN)
def test_the_score_of_a_pair_is_that_of_the_authors_package(
    family: str, backend: str, cache_dir: Path, tmp_path: Path
) -> None:
    card = read_card(write_reranker(tmp_path, family))
    encoder = load(card, backend, cache_dir)
    for prompt in {case["prompt"] for case in GOLDEN[family]}:
        cases = [case for case in GOLDEN[family] if case["prompt"] == prompt][:-1]  # the last one is cut
        expected = np.array([case["score"] for case in cases])
        assert np.ptp(expected) > 0.5
        pairs = [tuple(case["pair"]) for case in cases]
        for groups in ((), [[index] for index in range(len(pairs))]):
            scores, _ = rank(card, encoder, pairs, groups, prompt=prompt, activation="raw")
            assert np.abs(scores - expected).max() < 1e-3
        probabilities, _ = rank(card, encoder, pairs, prompt=prompt)
        assert np.abs(probabilities - 1 / (1 + np.exp(-expected))).max() < 1e-3


def ask_qwen3(
    directory: Path, instruction: str, max_length: int
) -> tuple[list[list[int]], NDArray[np.float32]]:
    """Return the ids and probabilities of PAIRS by the code in the README of Qwen3-Reranker, one pair at a time."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    before, behind = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix))
    rows, scores = [], []
    for query, document in PAIRS:
        told = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        room = max_length - len(before) - len(behind)
        own = tokenizer(told, truncation="longest_first", max_length=room)["input_ids"]
        rows.append(before + own + behind)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([rows[-1]])).logits[0, -1]
        scores.append(torch.log_softmax(torch.stack([logits[no], logits[yes]]), dim=0)[1].exp().item())
    return rows, np.array(scores, np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_tied", [True, False])
def test_qwen3_reranker_agrees_with_the_code_of_its_readme(
    is_tied: bool, backend: str, cache_dir: Path, tmp_path: Path
) -> None:
    directory = write_reranker(tmp_path, QWEN3, tie_word_embeddings=is_tied)
    card = read_card(directory)
    assert card.classifier is not None
    assert card.classifier.num_words == 2
    encoder = load(card, backend, cache_dir)
    for prompt, max_tokens in ((None, MAX_TOKENS), ("Find the opposite.", MAX_TOKENS), (None, 256)):
        rows, expected = ask_qwen3(directory, card.default_prompt if prompt is None else prompt, max_tokens)
        found = read(card, prompt, max_tokens)
        assert [found.ids(index).tolist() for index in range(len(PAIRS))] == rows
        assert np.ptp(expected) > 0.05
        alone, _ = rank(card, encoder, groups=EACH_ALONE, prompt=prompt, max_tokens=max_tokens)
        scores, finished = rank(card, encoder, prompt=prompt, max_tokens=max_tokens)
        assert np.abs(np.stack([alone, scores]) - expected).max() < 1e-4
        assert finished.truncated.tolist() == [False] * (len(PAIRS) - 1) + [max_tokens < MAX_TOKENS]
        assert finished.num_tokens.tolist() == [len(row) for row in rows]


def test_texts_that_are_tokenized_apart_have_other_tokens_than_in_their_template(tmp_path: Path) -> None:
    """So a reranker cannot be given the tokens of a query and of a document, as other models of pairs can."""
    card = read_card(write_reranker(tmp_path, QWEN3))
    tokenizer = Tokenizer(card.path)
    query, document = PAIRS[0]
    whole = read(card, None, MAX_TOKENS).ids(0).tolist()
    parts = [f"<Instruct>: {card.default_prompt}\n<Query>: ", query, "\n<Document>: ", document]
    for texts, is_within in ((["".join(parts)], True), (parts, False)):
        rows = [tokenizer.tokenize([text], MAX_TOKENS, truncate=True).ids(0) for text in texts]
        ids = np.concatenate(rows).tolist()
        assert any(whole[start : start + len(ids)] == ids for start in range(len(whole))) == is_within


def test_a_pair_without_room_or_without_a_document_fails_and_says_why(tmp_path: Path) -> None:
    card = read_card(write_reranker(tmp_path, QWEN3))
    encoder = load_classifier(card, "torch", tmp_path)
    lengths = read(card, None, MAX_TOKENS).lengths
    pairs = [PAIRS[0], ("many words of a query " * 20, "short")]
    _, finished = rank(card, encoder, pairs, max_tokens=int(lengths[0]))
    assert finished.truncated.tolist() == [False, False]
    assert finished.failures.keys() == {1}
    assert finished.failures[1].code == TOO_MANY_TOKENS
    assert "leave no room for the document" in finished.failures[1].detail
    _, finished = rank(card, encoder, pairs, max_tokens=int(lengths[0]), long_texts="fail")
    assert "allowed with long_texts=fail" in finished.failures[1].detail
    rounds = make_tasks(card)[JUDGE].process(make_spec(card, EncodingOptions()), [b"alone"], 100)
    assert not ask(rounds)[0].lengths.any()
    finished = finish(rounds, Ragged.from_matrix(np.zeros((1, 1), np.float32)))
    assert {index: failure.code for index, failure in finished.failures.items()} == {0: NO_PAIR}


def test_a_reranker_with_a_head_of_its_own_reads_the_same_words(tmp_path: Path) -> None:
    """As tomaarsen/Qwen3-Reranker-0.6B-seq-cls, whose head is the difference of the two rows."""
    causal = AutoModelForCausalLM.from_pretrained(directory := write_reranker(tmp_path, QWEN3))
    _, expected = ask_qwen3(directory, read_card(directory).default_prompt, MAX_TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    yes, no = (causal.lm_head.weight[tokenizer.convert_tokens_to_ids(word)] for word in ("yes", "no"))
    converted = Path(shutil.copytree(directory, tmp_path / f"{QWEN3}-seq-cls"))
    model = AutoModelForSequenceClassification.from_pretrained(converted, num_labels=1)
    with torch.no_grad():
        model.score.weight.copy_((yes - no)[None])
    model.save_pretrained(converted)
    card = read_card(converted)
    assert find_kind(card).name == "reranker"
    scores, _ = rank(card, load_classifier(card, "torch", tmp_path))
    assert np.abs(scores - expected).max() < 1e-4


def test_a_reranker_of_another_name_is_told_its_template(tmp_path: Path) -> None:
    directory = write_reranker(tmp_path, QWEN3).rename(tmp_path / "tuned")
    with pytest.raises(UnsupportedModel, match="its pooling"):
        read_card(directory)
    renamed = Path(shutil.copytree(directory, tmp_path / "my-rerank"))
    with pytest.raises(UnsupportedModel, match=r"a generative reranker.*set that as its template"):
        read_card(renamed)
    for row in RERANKERS:
        card = read_card(directory, template=row.name)
        assert card.classifier is not None
        assert card.classifier.template == row.template
        assert card.revision.endswith(f"+{row.name}")  # other words, other scores
    with pytest.raises(ModelError, match=r"unknown; expected one of qwen3-reranker, bge-reranker-gemma"):
        read_card(directory, template="qwen")
    with pytest.raises(ModelError, match="no reranker to which a template applies"):
        read_card(write_classifier(tmp_path / "bert", "bert"), template="qwen3-reranker")


def test_only_the_words_that_are_asked_for_are_read_of_the_output_matrix(tmp_path: Path) -> None:
    card = read_card(write_reranker(tmp_path, QWEN3))
    head = load_head(card)
    assert [tuple(parameter.shape) for parameter in head.parameters()] == [(2, 32)]
    assert card.find_shape().dense_values == 64


@pytest.mark.parametrize(
    "options",
    [{}, {"false": None, "trim": " | trim"}, {"family": GEMMA2}],
    ids=["two words", "one word, stripped texts", "bounded logits"],
)
def test_a_reranker_of_sentence_transformers_agrees_with_it(options: dict[str, Any], tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    directory = write_cross_encoder(tmp_path, prompts={"fact": "Is it a fact?"}, **options)
    theirs = CrossEncoder(str(directory), device="cpu")
    card = read_card(directory)
    encoder = load_classifier(card, "torch", tmp_path)
    # A row of as many tokens as are allowed is changed there as if it had been cut, so no row has 103.
    for prompt, max_tokens in ((None, MAX_TOKENS), ("fact", MAX_TOKENS), ("fact", 103)):
        assert max_tokens not in read(card, card.prompts.get(prompt or "", ""), MAX_TOKENS).lengths
        theirs.max_seq_length = max_tokens
        expected = theirs.predict(list(PAIRS), prompt_name=prompt, batch_size=1)
        assert np.ptp(expected) > 0.05
        scores, finished = rank(card, encoder, prompt=prompt, max_tokens=max_tokens)
        assert np.abs(scores - expected).max() < 1e-4
        assert finished.truncated.any() == (max_tokens < MAX_TOKENS)


def test_a_prompt_that_a_template_has_no_place_for_is_refused(tmp_path: Path) -> None:
    directory = write_cross_encoder(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ messages[-2].content }}\n{{ messages[-1].content }}")
    card = read_card(directory)
    assert make_spec(card, EncodingOptions()).prompt == ""
    with pytest.raises(InvalidOption, match="no place for a prompt"):
        make_spec(card, EncodingOptions(prompt="Is it a fact?"))


def test_a_chat_template_that_changes_texts_is_refused(tmp_path: Path) -> None:
    directory = write_cross_encoder(tmp_path)
    (directory / "chat_template.jinja").write_text(CHAT.replace("TRIM", " | upper"))
    with pytest.raises(UnsupportedModel, match="changes the texts of a pair"):
        read_card(directory)
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(UnsupportedModel, match="does not contain the document"):
        read_card(directory)
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no roles') }}")
    with pytest.raises(UnsupportedModel, match="no roles"):
        read_card(directory)


def test_a_classifier_that_sentence_transformers_saved_agrees_with_it(tmp_path: Path) -> None:
    """Since version 5.4 its modules.json names the transformer alone, and its activation is stored beside."""
    from sentence_transformers import CrossEncoder

    written = write_classifier(tmp_path / "written", "bert", num_labels=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = CrossEncoder(
            str(written),
            device="cpu",
            activation_fn=nn.Identity(),
            prompts={"fact": "Is it a fact? ", "web": "Search the web: "},
            default_prompt_name="web",
        )
        theirs.save(str(tmp_path / "saved"))
    card = read_card(tmp_path / "saved")
    assert card.classifier is not None
    assert (card.classifier.template, card.classifier.activation) == (None, "raw")
    encoder = load_classifier(card, "torch", tmp_path)
    for prompt in (None, "fact", ""):
        named: dict[str, Any] = {"prompt": ""} if prompt == "" else {"prompt_name": prompt}
        expected = theirs.predict(list(PAIRS), batch_size=1, **named)
        assert np.abs(rank(card, encoder, prompt=prompt)[0] - expected).max() < 1e-4
