"""State: what the steps of one card found, as lines of JSON in a directory. The first line says of which card and code.

A line is written when its step has ended, so that whatever interrupts the hour costs the step that was at work alone.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.order import BenchmarkFailed

RECORDS: Final = "records.jsonl"
DONE: Final = "done"
FAILED: Final = "failed"
TIMED_OUT: Final = "timed out"
# The code that is measured: another benchmark of the same product asks the same of it.
PRODUCT: Final = ("vectormill", "worker")
DIGEST_CHARS: Final = 12


@dataclass(frozen=True, slots=True)
class Identity:
    """What records belong to. `capability` is the device's feature of that name, such as sm_90; a processor's kind.

    `code` is a digest of the product's files; `commit` names them for people and is not compared, so that neither a
    fix of the benchmark nor a page of the docs costs the hour.
    """

    card: str
    capability: str
    torch: str
    scale: str
    code: str
    commit: str = field(default="", compare=False)

    def describe(self) -> str:
        commit = f"commit {self.commit}, " if self.commit else ""
        return f"{self.card} ({self.capability}, torch {self.torch}, {commit}code {self.code})"


@dataclass(frozen=True, slots=True)
class Record:
    """How a step ended. `result` is what it found until then, in the form of its kind; `reason` why it is not done."""

    step: str
    outcome: str
    seconds: float
    at: str
    result: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


class State:
    """The records of one directory, the newest of each step. Made by `open`."""

    def __init__(self, path: Path, records: Iterable[Record]) -> None:
        self._path = path
        self._records = {record.step: record for record in records}

    @classmethod
    def open(cls, directory: Path, identity: Identity) -> Self:
        """Begins, or goes on with what was recorded. Raises BenchmarkFailed where that is of something else."""
        path = directory / RECORDS
        directory.mkdir(parents=True, exist_ok=True)
        lines = list(_read_lines(path))
        if not lines:
            path.write_text(json.dumps(asdict(identity)) + "\n", encoding="utf-8")
            return cls(path, ())
        try:
            before = Identity(**lines[0])
            records = [Record(**line) for line in lines[1:]]
        except TypeError as error:
            raise BenchmarkFailed(
                f"{path} is in another form than this version writes ({error}); name another directory with --state."
            ) from error
        if before != identity:
            raise BenchmarkFailed(
                f"{directory} has records of {before.describe()}, and this is {identity.describe()}: they are "
                "not mixed. Name another directory with --state, or go back to that card and commit."
            )
        return cls(path, records)

    def find(self, step: str) -> Record | None:
        return self._records.get(step)

    def add(self, record: Record) -> None:
        """Written through, so that a machine that goes away has it on its disk."""
        self._records[record.step] = record
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def digest_code(root: Path, folders: Iterable[str] = PRODUCT) -> str:
    """Of the names and contents of all Python files below these folders."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:DIGEST_CHARS]


def find_commit(root: Path) -> str:
    """The short name of the checked-out commit; empty where that cannot be told, as in an unpacked archive."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _read_lines(path: Path) -> Iterable[dict[str, Any]]:
    """The whole lines; one that was cut off while it was written was never recorded, and is removed."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    for line in whole.splitlines():
        yield json.loads(line)
