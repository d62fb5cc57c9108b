"""Outcomes: where outcomes of contests are kept, one file for each question. Holds no contest itself.

To measure again, remove the folder `choices` of the cache directory.
"""

import fcntl
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from vectormill.files.replacement import open_replacement
from worker.backends.contest.outcome import Outcome
from worker.encoder.encoder import EncoderOrder

logger = logging.getLogger(__name__)

# Grows when contests or encoders change so much that what was measured before says nothing.
CONTEST_VERSION: Final = 2
PACKAGES: Final = ("vectormill", "openvino", "torch", "transformers")


def find_or_measure(order: EncoderOrder, measure: Callable[[], Outcome], *, load: float) -> Outcome:
    """The kept outcome if it holds under the machine's load, or that of `measure`, which runs in one process of this
    machine at a time.
    """
    question = describe_question(order)
    digest = hashlib.blake2b(json.dumps(question).encode(), digest_size=12).hexdigest()
    path = order.cache_dir / "choices" / f"{digest}.json"
    if (kept := read_outcome(path)) and kept.holds_under(load):
        return kept
    with hold_lock(path.parent):
        # Whoever waited for the lock finds what the holder measured.
        if (kept := read_outcome(path)) and kept.holds_under(load):
            return kept
        outcome = measure()
        if outcome.is_lasting:
            write_outcome(path, question, outcome)
        return outcome


def describe_question(order: EncoderOrder) -> dict[str, Any]:
    """Everything that a contest depends on; `order.precision` is a chosen one."""
    device = order.device
    return {
        "contest": CONTEST_VERSION,
        "model": order.card.name,
        "path": str(order.card.path),
        "revision": order.card.revision,
        "max_tokens": order.card.max_tokens,
        "precision": order.precision,
        "processor": device.description,
        "features": sorted(device.features),
        "cores": len(device.cores),
        "threads": order.num_threads,
        "versions": {package: _find_version(package) for package in PACKAGES},
    }


def read_outcome(path: Path) -> Outcome | None:
    """None where none is kept. A damaged file is one: it is measured and written again."""
    try:
        return Outcome.from_json(json.loads(path.read_text(encoding="utf-8"))["outcome"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be read (%s); the backends are measured again.", path, error)
        return None


def write_outcome(path: Path, question: dict[str, Any], outcome: Outcome) -> None:
    """Whole or not at all. A cache that cannot be written costs a contest at the next start, nothing more."""
    text = json.dumps({"question": question, "outcome": outcome.to_json()}, indent=2)
    try:
        with open_replacement(path) as file:
            file.write(text.encode() + b"\n")
    except OSError as error:
        logger.warning("%s cannot be written (%s); the next start measures again.", path, error)


@contextmanager
def hold_lock(directory: Path) -> Iterator[None]:
    """Waits for the one lock: two contests at the same time would measure each other.

    The kernel lets go when the holder dies. Where the file system has no locks, nothing is held.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("wb")
    except OSError:  # a cache that cannot be written
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("%s cannot be locked (%s).", directory, error)
        yield


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
