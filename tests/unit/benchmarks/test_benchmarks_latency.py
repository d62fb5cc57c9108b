"""The benchmarks `interactive`, `queries` and `short_texts`: what their measurements come to."""

import pytest

from benchmarks.cases.engine.short_texts import find_share, judge_cost
from benchmarks.cases.interactive import judge_latency
from benchmarks.cases.queries.queries import LOADED, NUM_CLIENTS, OURS, PEER, Round, judge
from benchmarks.results.spread import find_percentile
from benchmarks.texts import list_distinct_lines


@pytest.mark.parametrize(
    ("values", "percent", "expected", "reason"),
    [
        ([1.0], 99, 1.0, "of one measurement it is that one"),
        (list(range(1, 101)), 99, 99, "one of a hundred is slower"),
        (list(range(200, 0, -1)), 99, 198, "order does not matter"),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0, "it is a value that was measured, not one between two"),
    ],
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], percent: float, expected: float, reason: str
) -> None:
    assert find_percentile(values, percent) == expected, reason


def test_no_measurement_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="at least one"):
        find_percentile([], 99)


@pytest.mark.parametrize(("busy", "verdict"), [(0.06, "met"), (0.061, "missed")])
def test_searches_beside_a_bulk_job_are_judged_by_their_slowest_percent(busy: float, verdict: str) -> None:
    idle = [[0.01] * 98 + [0.02] * 2] * 3
    loaded = [[0.02] * 98 + [busy] * 2] * 3
    (table,) = judge_latency(idle, loaded).tables
    assert verdict in table.rows[0][2]
    assert [row[1] for row in table.rows[3:]] == ["0.01 s", "0.02 s"]


@pytest.mark.parametrize(("num_answers", "verdict"), [(200, "met"), (199, "missed")])
def test_queries_are_judged_by_what_many_clients_get_beside_the_peer(num_answers: int, verdict: str) -> None:
    def rounds(num: int, seconds: float) -> list[Round]:
        return [Round([seconds] * num, 1.0)] * 3

    found = {
        (system, number): rounds(num, seconds)
        for number in NUM_CLIENTS
        for system, num, seconds in ((OURS, num_answers, 0.1), (LOADED, 50, 0.3), (PEER, 100, 0.2))
    }
    measures, systems, costs = judge(found, {"api": 9.0 * num_answers / 1000, "flower": 0.0}).tables
    assert [verdict in row[2] for row in measures.rows] == [True, verdict == "met", verdict == "met"]
    assert len(systems.rows) == len(found)
    assert costs.rows == (("api", "1.00 ms"),)


def test_what_tokenizer_and_database_cost_is_a_share_of_all_processor_time() -> None:
    spent = {"model process": 80.0, "Celery worker": 10.0, "postgres": 5.0, "api": 4.0, "scheduler": 1.0}
    assert find_share(spent, ("Celery worker", "postgres")) == pytest.approx(0.15)
    job = {
        "num_items": 1000,
        "num_tokens": 9000,
        "created_at": "2026-01-01T00:00:00Z",
        "finished_at": "2026-01-01T00:00:10Z",
        "padding_waste": 0.012,
        "stages": {"tokenize": {"seconds": 2.0, "share": 0.2}, "run": {"seconds": 9.0, "share": 0.9}},
        "bound_by": {"value": "run", "reason": "It was busy 90% of the time."},
    }
    report = judge_cost([job] * 3, [spent] * 3)
    measures, stages = report.tables
    assert measures.rows[0][1:] == ("15.0%", "≤ 15%, met")
    rows = {row[0]: row[1] for row in measures.rows}
    assert (rows["texts/s"], rows["tokens/s"], rows["of it postgres"]) == ("100", "900", "5.0%")
    assert stages.rows == (("tokenize", "2.00 s", "20.0%"), ("run", "9.00 s", "90.0%"))
    assert "bounded by: run (It was busy 90% of the time)." in report.notes[-1]


def test_lines_that_are_used_again_differ_from_those_before() -> None:
    items = list_distinct_lines(70_000)
    assert len({item["text"] for item in items}) == len({item["key"] for item in items}) == 70_000
