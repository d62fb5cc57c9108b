"""Records of what was found about a model on a device, in files that all workers of the machine share."""

import fcntl
import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from vectormill.files.outputs import open_replacement
from worker.encoder.way import Way
from worker.tuning.comparison import WayResult, choose_best
from worker.tuning.trial import LOOK_SECONDS, TrialStopped

logger = logging.getLogger(__name__)

FOLDER: Final = "tuned"
# A failure that may pass, such as a lack of memory, is tried again after this time.
STALE_AFTER: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, order=True)
class TuningKey:
    """What the speed of a model depends on. What was found holds in the same circumstances only.

    `libraries` are those that compute, with their versions, and on a GPU its driver and the switches that are possible
    there. `num_workers` share the device.
    Backend, precision, attention and switches are as in an EncoderOrder, mostly "auto".
    """

    device: str
    features: tuple[str, ...]
    libraries: tuple[str, ...]
    model: str
    revision: str
    backend: str
    precision: str
    attention: str
    switches: str
    num_workers: int

    @property
    def key(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """What was found, in which circumstances and when, as ISO 8601. `lengths` are in tokens."""

    circumstances: TuningKey
    found_at: str
    lengths: tuple[int, ...]
    findings: tuple[WayResult, ...]

    @property
    def way(self) -> Way:
        """Return the way in which the model is to be run, with the reason."""
        best = choose_best(self.findings)
        usual = next(finding for finding in self.findings if not finding.flaw)
        found = (
            f"{best.compare(usual):.2f} times as fast as {usual.way}" if best != usual else "the fastest way"
        )
        return replace(best.way, reason=f"measured here on {self.found_at[:10]} to be {found}")

    def describe(self) -> list[dict[str, Any]]:
        """Return what was found of each way, for reports: tokens per second by the length of texts, or its flaw."""
        return [
            {
                "way": str(finding.way),
                "tokens_per_second": dict(
                    zip(map(str, self.lengths), map(round, finding.tokens_per_second), strict=False)
                ),
                "flaw": finding.flaw,
            }
            for finding in self.findings
        ]


def find_moment() -> str:
    """Return the present time as records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class TuningRecords:
    """The records below a cache directory. Several processes may use it at the same time."""

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / FOLDER

    def find(self, circumstances: TuningKey) -> TuningRecord | None:
        """Return the record for these circumstances; None if there is none that can be read and has a way to use."""
        path = self._path(circumstances)
        try:
            record = msgspec.json.decode(path.read_bytes(), type=TuningRecord)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("The record %s cannot be read, so the model is measured again: %s", path, error)
            return None
        age = datetime.now(UTC) - datetime.fromisoformat(record.found_at)
        is_stale = age > STALE_AFTER and any(finding.may_pass for finding in record.findings)
        is_useful = record.circumstances == circumstances and not all(each.flaw for each in record.findings)
        return record if is_useful and not is_stale else None

    def keep(self, record: TuningRecord) -> None:
        """Write a record in place of the one before. Raise OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open_replacement(self._path(record.circumstances)) as file:
            file.write(msgspec.json.format(msgspec.json.encode(record), indent=1))

    def refuse(self, circumstances: TuningKey, way: Way, flaw: str) -> TuningRecord | None:
        """Note that a way failed in service, so that no worker uses it before it is measured again.

        Return the record that is left; None if it has no way to use. Raise OSError.
        """
        record = self.find(circumstances)
        if record is not None:
            findings = tuple(
                replace(each, flaw=flaw, may_pass=True) if each.way == way else each
                for each in record.findings
            )
            self.keep(replace(record, found_at=find_moment(), findings=findings))
        return self.find(circumstances)

    def forget(self, model: str) -> int:
        """Remove the records of a model and return their number. Raise OSError."""
        num_removed = 0
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=TuningRecord)
            except ValueError:
                continue
            if record.circumstances.model == model:
                path.unlink(missing_ok=True)
                num_removed += 1
        return num_removed

    @contextmanager
    def locked(self, device: str, stopping: threading.Event) -> Iterator[None]:
        """Hold the right to measure on a device, which one process has at a time; wait for it.

        Raise TrialStopped once `stopping` is set, and OSError.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(device.encode()).hexdigest()[:16]
        with (self._folder / f"{name}.lock").open("w") as lock:
            while True:
                if stopping.is_set():
                    raise TrialStopped
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    stopping.wait(LOOK_SECONDS)
            yield

    def _path(self, circumstances: TuningKey) -> Path:
        return self._folder / f"{circumstances.key}.json"
