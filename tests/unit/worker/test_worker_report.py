"""What a worker says of itself: the engine's figures, what the worker alone knows, and its last ten minutes."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from vectormill.cli.service import show_workers_and_schedules, summarize_worker
from vectormill.workers.samples import MOST_SAMPLES, Sample, list_device_uses, read_samples
from worker.chunk.counts import WATCHED, ChunkCounts, Timesheet
from worker.devices.detect import DeviceUse
from worker.report import GAP_SECONDS, RecentSamples, WorkerReport, read_losses

PLACEMENT = {"strategy": "replicate", "stages": []}


class FakeEngine:
    """Has computed for nine of the ten seconds since its start."""

    run_seconds = 0.0

    def report(self) -> dict[str, Any]:
        return {
            "model": "m",
            "num_tokens": 4000,
            "stage_seconds": {"tokenize": 0.5, "collate": 0.1, "run": 9.0, "collect": 0.1},
        }


class FakeSampler:
    def sample(self) -> DeviceUse:
        return DeviceUse(3 << 30, 141 << 30, None)


def test_a_worker_tells_its_stages_what_bounds_it_and_how_much_of_its_device_is_in_use() -> None:
    now, engine = [100.0], FakeEngine()
    timesheet = Timesheet(lambda: engine.run_seconds, lambda: now[0])
    report = WorkerReport(
        cast(Any, engine), timesheet, {"cuda:0": cast(Any, FakeSampler())}, PLACEMENT, lambda: now[0]
    )
    with timesheet.hold(UUID(int=1)):
        now[0], engine.run_seconds = 110.0, 9.0
        timesheet.count({"load": 0.2, "tokenize": 0.4, "persist": 1.0})
        said = report.compose()
    assert said["uptime_seconds"] == 10
    assert said["stage_seconds"] == {
        "held": 10.0,
        "device": 9.0,
        "load": 0.2,
        "tokenize": 0.5,  # the engine's: it counts chunks too that were not committed
        "collate": 0.1,
        "run": 9.0,
        "collect": 0.1,
        "persist": 1.0,
    }
    assert said["stage_shares"]["run"] == pytest.approx(0.9)
    assert said["bound_by"]["value"] == "run"
    assert "computing for 90% of the time" in said["bound_by"]["reason"]
    assert (said["device_memory_used_bytes"], said["device_memory_total_bytes"]) == (3 << 30, 141 << 30)
    assert said["device_utilisation"] is None
    assert said["placement"] == PLACEMENT
    assert read_samples(said) == [Sample(0.0, 400, 3 << 10, None)]
    assert (said["chunk_outcomes"], said["num_stale_completions"]) == (dict.fromkeys(WATCHED, 0), 0)


def test_each_device_of_a_shared_model_is_told_and_all_together_as_the_fullest_with_their_mean_use() -> None:
    uses = {
        "cuda:0": DeviceUse(10 << 30, 80 << 30, 0.9),
        "cuda:1": DeviceUse(9 << 30, 24 << 30, 0.5),
        "cuda:2": DeviceUse(None, 80 << 30, None),
    }
    samplers: dict[str, Any] = {
        name: SimpleNamespace(sample=lambda use=use: use) for name, use in uses.items()
    }
    said = WorkerReport(cast(Any, FakeEngine()), Timesheet(lambda: 0.0), samplers, PLACEMENT).compose()
    assert (said["device_memory_used_bytes"], said["device_memory_total_bytes"]) == (9 << 30, 24 << 30)
    assert said["device_utilisation"] == pytest.approx(0.7)
    assert [(use["name"], use["memory_used_bytes"]) for use in list_device_uses(said)] == [
        ("cuda:0", 10 << 30),
        ("cuda:1", 9 << 30),
        ("cuda:2", None),
    ]
    row = summarize_worker({"name": "w", "model": "m", "report": said | {"placement": None}})
    assert (row["memory"], row["in use"]) == ("10.0 of 80, 9.0 of 24 GiB", "90%, 50%, -")


def test_a_worker_tells_which_devices_its_launcher_has_lost_among_the_reasons_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = tmp_path / "losses"
    placement = {"strategy": "replicate", "stages": [], "plan": {"reasons": ["It fits."]}}
    report = WorkerReport(
        cast(Any, FakeEngine()),
        Timesheet(lambda: 0.0),
        {"cuda:0": cast(Any, FakeSampler())},
        placement,
        losses=partial(read_losses, losses),
    )
    assert report.compose()["placement"] == placement
    losses.write_text("cuda:3 is lost.\n")
    said = report.compose()
    assert said["placement"]["plan"]["reasons"] == ["cuda:3 is lost.", "It fits."]
    workers = [{"name": name, "model": "m", "report": said | {"placement": None}} for name in ("v", "w")]
    show_workers_and_schedules(
        cast(Any, SimpleNamespace(workers=lambda: workers, schedules=list)), is_json=False
    )
    assert capsys.readouterr().err == "cuda:3 is lost.\n", "once, however many workers tell it"
    losses.write_text("")
    assert report.compose()["placement"] == placement


def test_a_worker_that_has_done_nothing_is_bound_by_nothing() -> None:
    class Idle(FakeEngine):
        def report(self) -> dict[str, Any]:
            return {"stage_seconds": {"tokenize": 0.0, "run": 0.0}}

    said = WorkerReport(
        cast(Any, Idle()), Timesheet(lambda: 0.0), {"cuda:0": cast(Any, FakeSampler())}, PLACEMENT
    ).compose()
    assert said["bound_by"] is None


def test_a_worker_whose_commits_wait_says_what_for_until_they_are_through() -> None:
    counts = ChunkCounts()
    report = WorkerReport(
        cast(Any, FakeEngine()),
        Timesheet(lambda: 0.0),
        {"cuda:0": cast(Any, FakeSampler())},
        PLACEMENT,
        counts=counts,
    )
    counts.note_wait(7, "No space left on device (SQLSTATE 53100)")
    said = report.compose()
    assert (said["state"], said["state_reason"]) == (
        "waiting to commit",
        "No space left on device (SQLSTATE 53100)",
    )
    counts.note_wait(7, None)
    assert "state_reason" not in report.compose()


GIB = 1 << 30


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_sample_is_taken_of_every_ten_seconds_however_often_reports_are_made() -> None:
    clock = Clock()
    recent = RecentSamples(clock)
    for number in range(1, 5):
        clock.now += 5
        recent.note(1000 * number, DeviceUse(2 * GIB, 8 * GIB, 0.2 * number))
    clock.now += 1
    assert read_samples({"recent": recent.write()}) == [
        Sample(11.0, 200, 2048, 30),  # the mean of 20 % and 40 %
        Sample(1.0, 200, 2048, 70),
    ]


def test_what_a_device_does_not_say_is_unknown_and_the_rate_is_told_all_the_same() -> None:
    clock = Clock()
    recent = RecentSamples(clock)
    clock.now += 20
    recent.note(500, DeviceUse(None, 8 * GIB, None))
    assert read_samples({"recent": recent.write()}) == [Sample(0.0, 25, None, None)]


def test_ten_minutes_are_kept_and_no_more() -> None:
    clock = Clock()
    recent = RecentSamples(clock)
    for number in range(3 * MOST_SAMPLES):
        clock.now += 10
        recent.note(1000 * number * number, DeviceUse(GIB, 8 * GIB, 0.5))
    kept = read_samples({"recent": recent.write()})
    assert len(kept) == MOST_SAMPLES
    assert (kept[0].seconds_ago, kept[-1].seconds_ago) == (10.0 * (MOST_SAMPLES - 1), 0.0)
    assert kept[-1].tokens_per_second > kept[0].tokens_per_second


def test_after_a_gap_the_samples_begin_anew() -> None:
    clock = Clock()
    recent = RecentSamples(clock)
    for seconds in (10, 10, GAP_SECONDS + 1):
        clock.now += seconds
        recent.note(0, DeviceUse(GIB, 8 * GIB, 0.5))
    assert len(read_samples({"recent": recent.write()})) == 1
