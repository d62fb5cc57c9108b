"""Garbage collection of a long-lived process: seldom, and never of what lives as long as the process."""

import gc
from typing import Final

# The collector looks for cycles only after this many new objects (some megabytes).
YOUNG_OBJECTS: Final = 20_000


def collect_seldom() -> None:
    """Keep the collector from scanning libraries and routes again and again, and objects that are soon gone.

    By default it took a sixth of the time of a search, and half of the time of reading rows from a source.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
