"""`score` and `accuracy`: their pairs, their recipe, their reports; no model is trained here, and none runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases.tasks.accuracy import Judgements, find_f1, judge, to_table
from benchmarks.cases.tasks.judging import find_device
from benchmarks.cases.tasks.pair_comparison import PairComparison
from benchmarks.cases.tasks.pair_model import (
    MAX_TOKENS,
    MODEL_INPUTS,
    RECIPE,
    find_pair_model,
    find_rate,
    load_pair_tokenizer,
    plan_batches,
)
from benchmarks.cases.tasks.score import choose_best
from benchmarks.models.random_classifier import write_random_classifier
from benchmarks.models.shapes import SHAPES
from benchmarks.pair_texts import list_parts, make_pairs
from benchmarks.systems.engine_alone import write_item
from benchmarks.systems.line_up import ENGINE, SERVICE
from benchmarks.systems.missing import MissingSystem
from benchmarks.systems.pairs.naive import choose_timed
from benchmarks.systems.pairs.pair_line_up import NAIVE, PairLineUp, make_cross_encoder
from benchmarks.systems.protocol import Pass
from benchmarks.systems.turns import Record
from vectormill.domain.tasks.pair import split_pair
from vectormill.models.model_card import read_model_card
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.encoder.choice import BF16, FP32
from worker.tokens.tokenizer import Tokenizer

PACKAGED = Registry({}).card(DEFAULT_MODEL)


def test_what_is_asked_was_not_in_the_lessons() -> None:
    lessons, questions = list_parts(is_test=False), list_parts(is_test=True)
    assert {each.module for each in lessons}.isdisjoint(each.module for each in questions)
    assert len(lessons) > len(questions) > 500


def test_half_of_the_pairs_belong_together_and_some_others_share_their_module() -> None:
    parts = list_parts(is_test=True)
    pairs = make_pairs(parts, 200)
    assert pairs == make_pairs(parts, 200)
    assert pairs != make_pairs(parts, 200, seed=1)
    own = {each.sentence: each.rest for each in parts}
    assert all((own[pair.text] == pair.text_pair) == pair.is_same for pair in pairs)
    assert sum(pair.is_same for pair in pairs) == len(pairs) / 2 == 200
    by_sentence = {each.sentence: each.module for each in parts}
    by_rest = {each.rest: each.module for each in parts}
    near = [by_sentence[pair.text] == by_rest[pair.text_pair] for pair in pairs if not pair.is_same]
    assert 60 < sum(near) < 160


def test_another_recipe_is_another_model(tmp_path: Path) -> None:
    one = find_pair_model(PACKAGED, home=tmp_path)
    assert one == find_pair_model(PACKAGED, home=tmp_path)
    assert one != find_pair_model(PACKAGED, replace(RECIPE, num_epochs=3), tmp_path)
    assert one != find_pair_model(replace(PACKAGED, revision="another"), home=tmp_path)


def test_the_reference_and_the_lessons_read_of_a_pair_what_the_engine_reads() -> None:
    pairs = make_pairs(list_parts(is_test=True), 20)
    first, second = [pair.text for pair in pairs], [pair.text_pair for pair in pairs]
    ours = Tokenizer(PACKAGED.path).tokenize_pairs(first, second, MAX_TOKENS, truncate=True)
    theirs = load_pair_tokenizer(PACKAGED.path)(first, second, truncation=True, max_length=MAX_TOKENS)
    assert set(theirs) == set(MODEL_INPUTS)
    for name, values in ours.inputs.items():
        assert [values.row(place).tolist() for place in range(len(pairs))] == theirs[name]


def test_an_epoch_has_every_pair_once_in_batches_of_about_one_length() -> None:
    recipe = replace(RECIPE, num_epochs=1, batch_size=8)
    pairs = make_pairs(list_parts(is_test=True), 64)
    batches = list(plan_batches(pairs, recipe))
    assert {len(batch) for batch in batches} == {8}
    flat = [pair for batch in batches for pair in batch]
    assert sorted(pair.text + pair.text_pair for pair in flat) == sorted(
        pair.text + pair.text_pair for pair in pairs
    )
    lengths = [[len(pair.text + pair.text_pair) for pair in batch] for batch in batches]
    assert sum(max(each) - min(each) for each in lengths) < len(batches) * (
        max(map(max, lengths)) - min(map(min, lengths))
    )
    assert flat != pairs


def test_the_rate_of_learning_rises_and_falls_to_nothing() -> None:
    rates = [find_rate(step, 100, 0.1) for step in range(101)]
    assert rates[9] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[100] == 0.0


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    truth = np.array([True, True, True, False, False])
    assert find_f1(truth, truth) == 1.0
    assert find_f1(truth, ~truth) == 0.0
    # Two of three found, one of three found is wrong.
    assert find_f1(truth, np.array([True, True, False, True, False])) == pytest.approx(2 / 3)


def test_a_way_that_decides_otherwise_misses_its_target_and_one_that_is_not_there_says_so() -> None:
    truth = np.arange(1000) % 2 == 0
    reference = np.where(truth, 0.9, 0.1)
    turned = reference.copy()
    turned[:8] = 1 - turned[:8]
    found = Judgements(
        truth,
        reference,
        {"openvino, fp32": reference + 1e-6, "torch, bf16": turned},
        {"torch, int8 weights": "no"},
    )
    rows = {row[0]: row[1:] for row in to_table(found).rows}
    assert rows["openvino, fp32"][1:] == ("+0.00 points", "0", "1.0e-06")
    assert rows["torch, bf16"][1:] == ("-0.80 points", "8", "8.0e-01")
    assert rows["torch, int8 weights"][0] == "not yet"
    (measure,) = judge(found)
    assert measure.row() == ("largest change of F1 (torch, bf16)", "0.80 points", "≤ 0.3 points, **missed**")
    (measure,) = judge(replace(found, by_way={"openvino, fp32": reference}))
    assert measure.is_met


def test_bf16_is_computed_on_every_processor() -> None:
    """Where it is emulated it rounds alike, and takes longer: no speed is measured."""
    assert find_device(BF16).has_bf16
    assert find_device(FP32).cores == find_device(BF16).cores


def make_record(name: str, seconds: list[float], megabytes: int, vectors: list[list[float]]) -> Record:
    passes = [Pass(each, 90, 100) for each in seconds]
    peak = megabytes << 20
    return Record(name, passes, peak, peak, np.array(vectors, dtype=np.float32))


def test_scores_are_compared_pair_by_pair_with_those_that_the_naive_way_has_judged() -> None:
    ours = [[0.1, 0.9], [0.2, 0.8], [0.3, 0.7], [0.4, 0.6]]
    comparison = PairComparison(
        "a shape",
        4,
        90,
        {
            SERVICE: make_record("ours, end to end", [2.0, 2.0], 300, ours),
            ENGINE: make_record("our engine alone", [1.0, 1.0], 200, ours),
            NAIVE: make_record("naive", [8.0, 6.0], 1000, [[0.1, 0.9], [0.25, 0.75]]),
            "peer": make_record("CrossEncoder", [2.0, 3.0], 900, ours),
            "gone": Record("gone", failure="not here"),
        },
        "peer",
    )
    assert choose_timed(4, 2) == [0, 2]
    assert choose_timed(3, 9) == [0, 1, 2]
    assert comparison.find_difference(ENGINE) == pytest.approx(0.05)
    rows = {row[0]: row for row in comparison.to_table().rows}
    assert rows["our engine alone"][3:5] == ("7.00× (6.00× to 8.00×)", "2.50× (2.00× to 3.00×)")
    assert rows["gone"][1] == "not measured"
    assert comparison.reasons() == {"gone": "not here"}
    met = {measure.name: measure.is_met for measure in comparison.judge()}
    assert met == {
        "a shape: ours, end to end, to naive": True,
        "a shape: ours, end to end, to CrossEncoder": False,
        "a shape: our engine alone, to naive": True,
        "a shape: our engine alone, to CrossEncoder": True,
        "a shape: peak memory, ours, end to end, below naive": True,
    }


def test_every_system_is_given_the_same_pairs(tmp_path: Path) -> None:
    pairs = make_pairs(list_parts(is_test=True), 3)
    line_up = PairLineUp(tmp_path, tmp_path / "model", (), find_device(FP32), pairs={"pairs": pairs})
    peer = make_cross_encoder(8)
    assert set(line_up.make((), [peer])) == {SERVICE, ENGINE, peer.name}
    texts = json.loads((tmp_path / "texts.json").read_text())
    assert texts == {"pairs": [[pair.text, pair.text_pair] for pair in pairs]}
    assert split_pair(write_item(texts["pairs"][0])) == (pairs[0].text.encode(), pairs[0].text_pair.encode())
    assert write_item("alone") == b"alone"


def test_options_of_a_peer_that_cannot_be_had_are_not_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peers = [make_cross_encoder(size) for size in (4, 8)]
    missing = {peer.name: MissingSystem(peer.title, "not installed") for peer in peers}
    monkeypatch.setattr(PairLineUp, "make", lambda *_: missing)
    line_up = PairLineUp(tmp_path, tmp_path, (), find_device(FP32))
    said: list[str] = []
    assert choose_best(line_up, peers, said.append) == peers[0]
    assert said[0] == "starting CrossEncoder.predict, batches of 4"


def test_a_classifier_of_random_weights_is_one_that_judges_pairs(tmp_path: Path) -> None:
    directory = write_random_classifier(SHAPES["tiny"], PACKAGED.path, tmp_path / "tiny")
    card = read_model_card("tiny", directory)
    assert card.classifier is not None
    assert (card.classifier.labels, card.max_tokens) == (("LABEL_0", "LABEL_1"), 512)
