"""BudgetFile: where a worker keeps what it learned about the size of batches, for the next start.

One file for each model, device, backend, precision and number of threads. A damaged or foreign file is as good as none.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from vectormill.files.replacement import open_replacement
from worker.batching.budget import LARGEST_TOKENS, LearnedClass

logger = logging.getLogger(__name__)

# Grows when what is kept means something else.
FORMAT: Final = 2
# Drivers and libraries change, and what was measured on a busy machine shall not hold for ever.
KEPT_SECONDS: Final = 30 * 24 * 3600.0


class BudgetFile:
    """`key` is everything that decides how fast a batch is; it is kept readable in the file."""

    def __init__(self, cache_dir: Path, key: Mapping[str, str | int]) -> None:
        text = json.dumps(key, sort_keys=True)
        self._key = dict(key)
        self.path = (
            cache_dir / "budgets" / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"
        )

    def load(self) -> dict[int, LearnedClass]:
        """By length class; empty when there is nothing, or nothing that can be used."""
        try:
            if time.time() - self.path.stat().st_mtime > KEPT_SECONDS:
                return {}
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            if kept["format"] != FORMAT:
                return {}
            return {int(length): _read_class(values) for length, values in kept["classes"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("The kept batch sizes in %s cannot be used: %r.", self.path, error)
            return {}

    def save(self, learned: Mapping[int, LearnedClass]) -> None:
        """Replaces the file whole. What another worker knows of a class that this one has not seen stays."""
        classes = {str(length): asdict(known) for length, known in {**self.load(), **learned}.items()}
        content = {"format": FORMAT, "key": self._key, "classes": classes}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_replacement(self.path) as file:
                file.write(json.dumps(content, indent=1).encode())
        except OSError as error:
            logger.warning("Batch sizes are not kept for the next start: %s.", error)


def _read_class(values: Mapping[str, Any]) -> LearnedClass:
    """Raises ValueError, KeyError or TypeError for what TokenBudget could not go on from."""
    rates = {_read_size(size): _read_positive(rate) for size, rate in values["rates"].items()}
    if not rates:
        raise ValueError("no rates")
    ceiling = values["ceiling_tokens"]
    return LearnedClass(
        rates=rates,
        seconds={_read_size(size): _read_positive(seconds) for size, seconds in values["seconds"].items()},
        tokens_per_second=float(values["tokens_per_second"]),
        ceiling_tokens=None if ceiling is None else _read_size(ceiling),
        num_out_of_memory=int(values["num_out_of_memory"]),
        num_relapses=int(values["num_relapses"]),
    )


def _read_size(value: str | int) -> int:
    size = int(value)
    if not 0 < size <= LARGEST_TOKENS:
        raise ValueError(f"a size of {size}")
    return size


def _read_positive(value: float) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"a rate of {number}")
    return number
