"""What `extract` measures: its texts, the reference's way beside ours, and its tables."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases.tasks.extract import ENGINE, REFERENCE, TITLES, Extracted, count_types, make_report
from benchmarks.cases.tasks.extract_texts import SCHEMAS, list_tagged_texts, split_tag, write_schema
from benchmarks.systems.extraction import one_at_a_time
from benchmarks.systems.extraction.one_at_a_time import ENCODER, TRANSFORMERS, OneAtATime
from benchmarks.systems.extraction.rows import digest_records
from benchmarks.systems.protocol import ChildOrder, Pass
from benchmarks.systems.turns import Record
from tests.rexuninlu import GOLDEN, is_certain, list_cases
from vectormill.domain.tasks.schema import check_schema
from vectormill.models.random_extractor import TINY, write_random_extractor


def test_texts_of_every_length_are_asked_for_one_to_forty_types() -> None:
    split = [split_tag(tagged) for tagged in list_tagged_texts(25)]
    assert sorted({number for number, _ in split}) == list(range(len(SCHEMAS)))
    lengths = [len(text) for _, text in split]
    assert 20 <= min(lengths) < 60
    assert 400 < max(lengths) <= 2000
    counts = [count_types(number) for number in range(len(SCHEMAS))]
    assert (counts[0], counts[-1]) == (1, 40)
    assert all(check_schema(json.loads(write_schema(number))) for number in range(len(SCHEMAS)))


def test_the_encoder_of_transformers_finds_what_ours_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the golden checkpoint whose distances have no logarithm, as the benchmark's shape."""
    cases = [
        case
        for case in list_cases("natural", "model")
        if is_certain(case) and not case.get("raises") and case["output"]["count"]
    ]
    order = ChildOrder(str(GOLDEN / "model"), "", "", "")
    theirs_order = replace(order, options={ENCODER: TRANSFORMERS})
    ours, theirs = OneAtATime(order), OneAtATime(theirs_order)
    for case in cases[:3]:
        monkeypatch.setattr(one_at_a_time, "SCHEMAS", (case["schema"],))
        found, expected = (system([f"0\t{case['text']}"]) for system in (ours, theirs))
        np.testing.assert_array_equal(found.vectors, expected.vectors)
        assert ours.report()["num_records"] == theirs.report()["num_records"] == case["output"]["count"]
        assert found.num_tokens == expected.num_tokens == found.num_computed_tokens
    assert cases


def test_random_weights_are_the_same_each_time_and_have_the_published_names(tmp_path: Path) -> None:
    first, second = (write_random_extractor(TINY, GOLDEN / "model", tmp_path / name) for name in "ab")
    content = (first / "model.safetensors").read_bytes()
    assert content == (second / "model.safetensors").read_bytes()


def test_equal_records_have_equal_rows_and_others_have_not() -> None:
    rows = digest_records([[], [[{"type": "a"}]], []])
    assert rows.shape == (3, 16)
    np.testing.assert_array_equal(rows[0], rows[2])
    assert (rows[0] != rows[1]).any()


def test_the_report_names_speed_padding_equal_records_and_what_was_refused() -> None:
    rows = digest_records([[], [], []])
    report = {"num_records": 7, "square_padding": 0.04}
    records = {key: Record(title, failure="it cannot be shared") for key, title in TITLES.items()}
    records[REFERENCE] = Record("reference", [Pass(12.0, 100, 100)], 1 << 20, 1 << 20, rows, report)
    records[ENGINE] = Record("engine", [Pass(2.0, 100, 110)], 1 << 20, 1 << 20, rows, report)
    text = make_report(Extracted(3, records), 1, is_quick=False).to_markdown("today", "facts")
    assert "| our engine, to the reference's way | 6.00× | ≥ 5×, met |" in text
    assert "| 4.0% | ≤ 5%, met |" in text
    assert "in the worst row | 100.0% | 100%, met |" in text
    assert "data parallel, two replicas was not measured: it cannot be shared" in text
    assert "| 88 |" in text
