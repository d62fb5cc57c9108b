"""Duplicates are found among any number of keys, nothing else is, and no key is read more often than twice."""

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vectormill.domain.errors import DiskFull
from vectormill.jobs import duplicate_keys
from vectormill.jobs.duplicate_keys import DuplicateFinder, refuse_full_disk


@pytest.mark.parametrize("num_keys", [8, 64, 500])
def test_a_key_that_comes_again_is_found_however_many_lie_between(
    monkeypatch: pytest.MonkeyPatch, num_keys: int
) -> None:
    monkeypatch.setattr(duplicate_keys, "_SHARE_KEYS", 16)
    monkeypatch.setattr(duplicate_keys, "_BLOCK_KEYS", 4)
    keys = [f"k{number}" for number in range(num_keys)]
    ledger = DuplicateFinder()
    ledger.add_all(keys)
    assert ledger.find_duplicate() is None
    ledger.add_all([keys[5], keys[1]])
    assert ledger.find_repeated().tolist() == [num_keys, num_keys + 1]
    assert ledger.find_duplicate() in ((5, num_keys), (1, num_keys + 1))
    ledger.close()


def test_the_bytes_that_are_read_grow_no_faster_than_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    class Counted:
        """A temporary file whose reads are counted."""

        def __init__(self, **options: Any) -> None:
            self._file = open_file(**options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> "Counted":
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def read(self, size: int) -> bytes:
            nonlocal num_read
            data: bytes = self._file.read(size)
            num_read += len(data)
            return data

    open_file: Any = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", Counted)
    monkeypatch.setattr(duplicate_keys, "_SHARE_KEYS", 16)
    monkeypatch.setattr(duplicate_keys, "_BLOCK_KEYS", 4)
    ledger = DuplicateFinder()
    for number in range(0, 4096, 4):
        ledger.add_all([f"k{each}" for each in range(number, number + 4)])
    assert ledger.find_duplicate() is None
    assert num_read == 4096 * (8 + 16)
    ledger.close()


class Colliding(str):
    """A key with the same hash as all others."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 7


@pytest.mark.parametrize("share_keys", [1 << 20, 4])  # in memory, and in sorted runs
def test_different_keys_with_one_hash_are_told_apart_by_reading_them(
    monkeypatch: pytest.MonkeyPatch, share_keys: int
) -> None:
    monkeypatch.setattr(duplicate_keys, "_SHARE_KEYS", share_keys)
    monkeypatch.setattr(duplicate_keys, "_BLOCK_KEYS", 4)
    keys = [Colliding(f"k{number}") for number in range(10)]
    ledger = DuplicateFinder()
    ledger.add_all(keys)
    assert ledger.find_duplicate(keys.__getitem__) is None
    assert ledger.find_duplicate() == (0, 1)
    keys += [Colliding(name) for name in ("k4", "new", "k2", "k4")]
    ledger.add_all(keys[10:])
    assert ledger.find_duplicate(keys.__getitem__) == (4, 10)
    ledger.close()


@pytest.mark.parametrize("again", [3, 40, 150, 290])
def test_the_first_key_that_repeats_is_named_whatever_comes_later(
    monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    monkeypatch.setattr(duplicate_keys, "_SHARE_KEYS", 16)
    monkeypatch.setattr(duplicate_keys, "_BLOCK_KEYS", 4)
    keys = [f"k{number}" for number in range(300)]
    keys[again] = keys[2]
    keys[again + 1 :] = [*(f"k{number}" for number in range(again + 1)), *["last"] * 50]
    ledger = DuplicateFinder()
    ledger.add_all(keys)
    assert ledger.find_duplicate(keys.__getitem__) == (2, again)
    ledger.close()


def test_a_key_that_is_everywhere_fills_no_memory_and_whoever_waits_is_told_of_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(duplicate_keys, "_SHARE_KEYS", 16)
    monkeypatch.setattr(duplicate_keys, "_BLOCK_KEYS", 4)
    sizes: list[int] = []
    find = duplicate_keys._find_first

    def find_counted(rows: Any, *others: Any) -> Any:
        sizes.append(len(rows[0]))
        return find(rows, *others)

    monkeypatch.setattr(duplicate_keys, "_find_first", find_counted)
    ledger = DuplicateFinder()
    ledger.add_all(["same"] * 1600)
    assert ledger.find_duplicate() == (0, 1)
    assert max(sizes) == 16
    ledger.close()
    distinct = DuplicateFinder()
    distinct.add_all([f"k{number}" for number in range(1600)])
    signs: list[None] = []
    assert distinct.find_duplicate(check=lambda: signs.append(None)) is None
    assert len(signs) == 2 * 100
    distinct.close()


def test_a_disk_without_room_is_refused_before_any_key_is_read_and_while_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    assert refuse_full_disk(41) == 41 * 24
    with pytest.raises(DiskFull, match=r"takes 1,008 bytes .* where 1,000 are free"):
        refuse_full_disk(42)
    monkeypatch.setattr(duplicate_keys, "_BLOCK_KEYS", 4)
    ledger = DuplicateFinder()
    with Path("/dev/full").open("wb", buffering=0) as full:  # each write to it fails with ENOSPC
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: full)
        with pytest.raises(DiskFull, match="No room is left"):
            ledger.add_all(["a", "b", "c", "d"])
