"""How a job went while somebody looked, the buttons of its state, and the message of a view."""

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from api.console.console import write_message
from api.console.history import MAX_JOBS, MAX_SAMPLES, Histories, find_runs
from api.console.jobs import JobView
from tests.jobs import JOB, START
from vectormill.jobs.job import Job


def after(seconds: float, num_done: int, **stages: float) -> Job:
    return replace(JOB, now=START + timedelta(seconds=seconds), num_done=num_done, stage_seconds=stages)


def test_a_job_that_is_looked_at_late_went_straight_until_then() -> None:
    histories = Histories()
    for seconds in (100, 101, 102):  # what does not move is not kept
        histories.note(after(seconds, 500, run=90, persist=10))
    (stretch,) = histories.find(JOB.id)
    assert (stretch.begin, stretch.end) == (START.timestamp(), START.timestamp() + 100)
    assert stretch.items_per_second == 5
    assert stretch.shares["run"] == pytest.approx(0.9)
    assert stretch.bound_by == "run"


def test_what_bounded_it_is_told_for_each_stretch_and_neighbours_are_one_run() -> None:
    histories = Histories()
    for job in (
        after(100, 500, run=95, held=100),
        after(200, 900, run=190, held=200),
        after(250, 950, run=195, persist=40, held=250),
    ):
        histories.note(job)
    runs = find_runs(histories.find(JOB.id))
    assert [(run.stage, round(run.seconds)) for run in runs] == [("run", 200), ("persist", 50)]
    assert sum(run.width for run in runs) == pytest.approx(1)
    last = after(250, 950, run=195, persist=40)
    page = JobView(last, None, stretches=histories.find(last.id))
    assert page.rate_chart is not None
    assert page.rate_chart["series"][0]["values"] == [5.0, 5.0, 4.0, 1.0]
    assert page.stage_chart is not None
    assert [one["label"] for one in page.stage_chart["series"]] == ["model", "writing results"]
    assert {len(one["values"]) for one in page.stage_chart["series"]} == {len(page.stage_chart["x"])}
    assert [row.name for row in page.stages] == ["run", "persist"]


def test_a_rate_is_a_mean_of_ten_seconds_and_not_of_the_chunk_that_was_just_committed() -> None:
    histories = Histories()
    for seconds in range(
        1, 31
    ):  # one chunk of 500 texts a second after the other, and then none for four seconds
        histories.note(after(seconds, 1000 * (seconds // 5) + 500 * (seconds % 5 == 4), run=seconds))
    page = JobView(after(30, 6000), None, stretches=histories.find(JOB.id))
    assert page.rate_chart is not None
    values = page.rate_chart["series"][0]["values"]
    assert len(values) == len(page.rate_chart["x"])
    assert set(values[4:]) == {200.0}


def test_whole_percents_of_stages_add_up_to_a_hundred() -> None:
    spent = {"load": 2.45, "tokenize": 7.4, "collate": 3.35, "run": 84.42, "collect": 0.2, "persist": 2.18}
    spent["wait"] = 900  # while a chunk waits, nothing is busy with it
    page = JobView(after(30, 3000, **spent), None)
    assert [row.percent for row in page.stages] == [3, 7, 3, 85, 0, 2]
    assert page.waited_seconds == pytest.approx(900 / (JOB.num_chunks - JOB.num_open_chunks))


def test_a_long_job_keeps_its_start_and_its_end_and_never_many_samples() -> None:
    histories = Histories()
    for seconds in range(1, 20_000):
        histories.note(after(seconds, 10 * seconds, run=seconds))
    stretches = histories.find(JOB.id)
    assert MAX_SAMPLES / 4 < len(stretches) <= MAX_SAMPLES
    assert stretches[0].begin == START.timestamp()
    assert stretches[-1].end == START.timestamp() + 19_999
    assert all(stretch.items_per_second == pytest.approx(10) for stretch in stretches)
    assert max(stretch.end - stretch.begin for stretch in stretches) < 20_000 / 10


def test_of_many_jobs_the_last_that_were_looked_at_are_kept() -> None:
    histories = Histories()
    jobs = [replace(JOB, id=uuid4()) for _ in range(MAX_JOBS + 1)]
    for job in jobs:
        histories.note(job)
    assert histories.find(jobs[0].id) == []
    assert histories.find(jobs[-1].id)
    histories.note(replace(JOB, id=(unstarted := uuid4()), started_at=None))
    assert histories.find(unstarted) == []


def test_a_retry_that_takes_errors_back_is_no_negative_rate() -> None:
    histories = Histories()
    histories.note(replace(after(100, 400), num_failed=100))
    histories.note(after(110, 410))
    assert [stretch.items_per_second for stretch in histories.find(JOB.id)] == [5, 0]


def test_a_job_has_the_buttons_of_its_state() -> None:
    for state, num_failed, actions in (
        ("uploading", 0, []),
        ("queued", 0, ["pause", "cancel"]),
        ("running", 1, ["pause", "cancel"]),
        ("paused", 0, ["resume", "cancel"]),
        ("paused", 1, ["resume", "retry", "cancel"]),
        ("cancelling", 0, []),
        ("completed", 0, []),
        ("completed_with_errors", 1, ["retry"]),
        ("failed", 1, ["retry"]),
        ("cancelled", 0, []),
    ):
        found = JobView(replace(JOB, state=state, num_failed=num_failed), None).actions
        assert [action.name for action in found] == actions, state


def test_each_line_of_a_view_becomes_a_line_of_data() -> None:
    assert write_message("<p>a\n  b</p>") == "data: <p>a\ndata:   b</p>\n\n"
