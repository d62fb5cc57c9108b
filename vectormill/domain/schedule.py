"""Schedule: when a collection is re-indexed, and what becomes of a due time while a run is still going on."""

from typing import Final

SKIP: Final = "skip"
QUEUE: Final = "queue"

OVERLAPS: Final = (SKIP, QUEUE)
