"""Outcome: what the backends did in a contest, and what follows from it. Knows neither processes nor files."""

from dataclasses import dataclass, field
from typing import Any, Final

from worker.encoder.choice import OPENVINO, TORCH
from worker.encoder.encoder import Choice

# By how much torch must be faster: a smaller lead another contest may not repeat, and openvino's process is smaller by
# a third (413 MiB against 600 for the default model).
SMALLEST_LEAD: Final = 1.05
# Processes that wanted a core, for each that there is: from here on what was measured says as much of the others.
BUSY_LOAD: Final = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens per second of each backend that ran, and for each that did not, the reason. `day` is written 2026-11-21.

    It lasts when the same would come of another contest: a process that crashed may not crash the next time. `load`
    is what others asked of the machine when it began, in processes for each core.
    """

    day: str
    rates: dict[str, float] = field(default_factory=dict)
    losses: dict[str, str] = field(default_factory=dict)
    is_lasting: bool = True
    load: float = 0.0

    def holds_under(self, load: float) -> bool:
        """Whether it is to be believed still: measured on a busy machine, until that is half as busy."""
        return self.load < BUSY_LOAD or load > self.load / 2

    def to_json(self) -> dict[str, Any]:
        return {"day": self.day, "tokens_per_second": self.rates, "losses": self.losses, "load": self.load}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Outcome":
        """Raises KeyError, TypeError, ValueError or AttributeError for anything that to_json did not write."""
        rates = {str(name): float(rate) for name, rate in values["tokens_per_second"].items()}
        losses = {str(name): str(reason) for name, reason in values["losses"].items()}
        if (rates.keys() | losses.keys()) != {OPENVINO, TORCH}:
            raise ValueError("an outcome speaks of every backend")
        # The load is missing in files that older workers wrote.
        return cls(str(values["day"]), rates, losses, load=float(values.get("load", 0.0)))


def decide_contest(outcome: Outcome) -> Choice:
    """The backend to use. openvino where neither could be measured: loading it will tell why."""
    if not outcome.rates:
        return Choice(OPENVINO, f"not measured: {'; '.join(sorted(set(outcome.losses.values())))}")
    if outcome.losses:
        [(loser, reason)] = outcome.losses.items()
        return Choice(next(iter(outcome.rates)), f"{loser} cannot run this model here: {reason}")
    openvino, torch = outcome.rates[OPENVINO], outcome.rates[TORCH]
    reason = f"measured here on {outcome.day}: openvino {openvino:,.0f} tokens/s, torch {torch:,.0f}"
    if torch > openvino * SMALLEST_LEAD:
        return Choice(TORCH, reason)
    return Choice(OPENVINO, f"{reason}; openvino needs less memory" if torch > openvino else reason)
