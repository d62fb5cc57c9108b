"""KeyLedger finds what is there twice, whatever its size, and reads no key more often than twice."""

import tempfile
from typing import Any

import pytest

from vectormill.jobs import key_ledger
from vectormill.jobs.key_ledger import KeyLedger


@pytest.mark.parametrize("num_keys", [8, 64, 500])
def test_a_key_that_comes_again_is_found_however_many_lie_between(
    monkeypatch: pytest.MonkeyPatch, num_keys: int
) -> None:
    monkeypatch.setattr(key_ledger, "_SHARE_KEYS", 16)
    monkeypatch.setattr(key_ledger, "_BLOCK_KEYS", 4)
    keys = [f"k{number}" for number in range(num_keys)]
    ledger = KeyLedger()
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
    monkeypatch.setattr(key_ledger, "_SHARE_KEYS", 16)
    monkeypatch.setattr(key_ledger, "_BLOCK_KEYS", 4)
    ledger = KeyLedger()
    for number in range(0, 4096, 4):
        ledger.add_all([f"k{each}" for each in range(number, number + 4)])
    assert ledger.find_duplicate() is None
    assert num_read == 4096 * (8 + 16)
    ledger.close()
