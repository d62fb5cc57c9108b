"""Look: what is shown of something that is watched, wherever it is shown."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """The progress of something. `share`, 0 to 1, is the part of `stage` that is done, None where that is unknown.

    `reason` is shown once, until it changes.
    """

    stage: str
    counts: str = ""
    share: float | None = None
    reason: str | None = None

    @property
    def line(self) -> str:
        return f"{self.stage}: {self.counts}" if self.counts else self.stage
