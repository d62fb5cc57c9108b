"""Navigation: the pages that every page leads to, in their order."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Entry:
    """`path` is also the beginning of the paths of pages below it."""

    path: str
    title: str


NAVIGATION: Final = (
    Entry("/console/jobs", "Jobs"),
    Entry("/console/queue", "Queue"),
    Entry("/console/workers", "Workers"),
    Entry("/console/collections", "Collections"),
    Entry("/console/schedules", "Schedules"),
    Entry("/console/docs", "API"),
)
