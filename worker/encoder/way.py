"""Ways to run a model on a device: a backend and the switches of its network. Imports no framework."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model.

    `reason` says why it was chosen, to complete a sentence; it is empty for a way that is only tried.
    """

    backend: str
    switches: tuple[str, ...] = ()
    reason: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.backend} with {', '.join(self.switches)}" if self.switches else self.backend
