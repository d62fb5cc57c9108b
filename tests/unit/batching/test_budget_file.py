"""What a worker learned about batches, from one start to the next."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker.batching.budget import LearnedClass
from worker.batching.budget_file import KEPT_SECONDS, BudgetFile

KEY: dict[str, str | int] = {"model": "m", "revision": "r", "device": "cpu", "threads": 2}
LEARNED = {
    64: LearnedClass({2048: 1.0, 1024: 0.99}, {2048: 0.2}, 8000.0),
    1024: LearnedClass({2048: 1.0}, {}, 0.0, 512, 3, 1),
}


def test_what_was_saved_is_loaded_unchanged_and_in_order(tmp_path: Path) -> None:
    BudgetFile(tmp_path, KEY).save(LEARNED)
    loaded = BudgetFile(tmp_path, dict(reversed(KEY.items()))).load()
    assert loaded == LEARNED
    assert list(loaded[64].rates) == [2048, 1024], "the first size is the one that the others are relative to"


@pytest.mark.parametrize("name", ["model", "revision", "device", "threads"])
def test_what_holds_for_one_model_and_device_is_not_taken_for_another(tmp_path: Path, name: str) -> None:
    BudgetFile(tmp_path, KEY).save(LEARNED)
    assert BudgetFile(tmp_path, KEY | {name: "other"}).load() == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format": 2}',
        b'{"format": 99, "classes": {}}',
        b'{"format": 2, "classes": {"64": {"rates": {}}}}',
        b'{"format": 2, "classes": {"64": {"rates": {"2048": "fast"}}}}',
        b'{"format": 2, "classes": {"64": {"rates": {"-5": 1.0}}}}',
        b'{"format": 2, "classes": {"64": {"rates": {"2048": NaN}}}}',
        b'{"format": 2, "classes": ["64"]}',
    ],
)
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    file = BudgetFile(tmp_path, KEY)
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    assert file.load() == {}
    file.save(LEARNED)
    assert file.load() == LEARNED


def test_classes_that_another_worker_learned_are_kept(tmp_path: Path) -> None:
    BudgetFile(tmp_path, KEY).save({64: LEARNED[64]})
    BudgetFile(tmp_path, KEY).save({1024: LEARNED[1024]})
    assert BudgetFile(tmp_path, KEY).load() == LEARNED


def test_workers_that_save_at_the_same_time_leave_a_whole_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: BudgetFile(tmp_path, KEY).save(LEARNED), range(32)))
    assert json.loads(BudgetFile(tmp_path, KEY).path.read_text())["key"] == KEY
    assert len(list((tmp_path / "budgets").iterdir())) == 1


def test_what_was_measured_long_ago_is_measured_again(tmp_path: Path) -> None:
    file = BudgetFile(tmp_path, KEY)
    file.save(LEARNED)
    long_ago = time.time() - KEPT_SECONDS - 1
    os.utime(file.path, (long_ago, long_ago))
    assert file.load() == {}


def test_a_directory_that_cannot_be_written_is_said_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "budgets").write_text("a file where the folder should be")
    file = BudgetFile(tmp_path, KEY)
    file.save(LEARNED)
    assert file.load() == {}
    assert "not kept" in caplog.text
