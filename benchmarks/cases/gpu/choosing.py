"""Which switches a card is to have, from pairs of passes with and without one. Pure: measures nothing.

A switch is kept that brings at least 1 % beyond the spread: in the worst of the repetitions, of which each compares two
passes that were made side by side.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from benchmarks.results.spread import Spread

LEAST_GAIN: Final = 0.01

HELPS: Final = "helps"
HARMS: Final = "harms"
NEUTRAL: Final = "neutral"
UNPROVEN: Final = "unproven"  # it failed, or was not measured to the end
FLAWS: Final[Mapping[str, str]] = {HARMS: "it is slower", UNPROVEN: "it was not measured to the end"}


@dataclass(frozen=True, slots=True)
class Timed:
    """Passes over texts of one length, pair by pair: seconds without the switch, and with it. `flop` is of one pass."""

    num_tokens: int
    flop: float
    base_seconds: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def ratio(self) -> Spread:
        """How many times faster with it, repetition by repetition."""
        return Spread.of([base / own for base, own in zip(self.base_seconds, self.seconds, strict=True)])


@dataclass(frozen=True, slots=True)
class Pair:
    """One switch added to those of `base`, by the tokens of a text. Bytes are peaks, and those of tensors on a GPU."""

    base: tuple[str, ...]
    added: str
    by_length: Mapping[int, Timed]
    base_bytes: int
    num_bytes: int
    precision: str
    attention: str

    @property
    def verdict(self) -> str:
        """Harm at one length is harm; else help at one is help."""
        ratios = [timed.ratio for timed in self.by_length.values()]
        if any(ratio.high <= 1 - LEAST_GAIN for ratio in ratios):
            return HARMS
        return HELPS if any(ratio.low >= 1 + LEAST_GAIN for ratio in ratios) else NEUTRAL

    @property
    def gain(self) -> float:
        """The geometric mean of the median ratios over all lengths, less one."""
        product = 1.0
        for timed in self.by_length.values():
            product *= timed.ratio.median
        return float(product ** (1 / len(self.by_length))) - 1

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """As dataclasses.asdict and JSON leave one."""
        by_length = {
            int(length): Timed(
                timed["num_tokens"], timed["flop"], tuple(timed["base_seconds"]), tuple(timed["seconds"])
            )
            for length, timed in values["by_length"].items()
        }
        return cls(**{**values, "base": tuple(values["base"]), "by_length": by_length})


@dataclass(frozen=True, slots=True)
class Together:
    """What is kept of the switches of one shape. `pairs` are those that were measured for it, and `untried` are the
    switches for which no time was left.
    """

    kept: tuple[str, ...]
    pairs: tuple[Pair, ...] = ()
    untried: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        pairs = tuple(Pair.from_json(pair) for pair in values["pairs"])
        return cls(tuple(values["kept"]), pairs, tuple(values["untried"]))


def order_candidates(alone: Sequence[Pair], by_name: Collection[str] = ()) -> tuple[str, ...]:
    """The switches that help when they are alone, the best first; without those that a card gets by name only."""
    helping = [pair for pair in alone if pair.verdict == HELPS and pair.added not in by_name]
    return tuple(pair.added for pair in sorted(helping, key=lambda pair: -pair.gain))


def choose_together(
    candidates: Sequence[str],
    measure: Callable[[tuple[str, ...], str], Pair | None],
    tell: Callable[[Together], None],
) -> Together:
    """Adds the candidates one after the other, and keeps what still helps beside those before it.

    `measure` answers None when there is no time left for another pair; `tell` gets what is known after each.
    """
    kept = tuple(candidates[:1])
    pairs: list[Pair] = []
    for place, name in enumerate(candidates[1:], start=1):
        pair = measure(kept, name)
        if pair is None:
            return Together(kept, tuple(pairs), tuple(candidates[place:]))
        pairs.append(pair)
        if pair.verdict == HELPS:
            kept = (*kept, name)
        tell(Together(kept, tuple(pairs), tuple(candidates[place + 1 :])))
    return Together(kept, tuple(pairs))


@dataclass(frozen=True, slots=True)
class Shape:
    """What was found for one shape: pairs alone by switch, of which None failed, and what is kept together; None where
    that was not measured. Switches that cannot be tried with the shape are not among them.
    """

    alone: Mapping[str, Pair | None]
    together: Together | None

    def judge(self, name: str) -> tuple[str, str]:
        """A verdict and its reason, of one switch of `alone`."""
        pair = self.alone[name]
        if pair is None:
            return UNPROVEN, "it failed"
        if pair.verdict != HELPS:
            return pair.verdict, "alone"
        if self.together is None:
            return UNPROVEN, "the best ones together were not measured"
        if name in self.together.untried:
            return UNPROVEN, "no time was left to try it with the others"
        added = next((each for each in self.together.pairs if each.added == name), None)
        if name in self.together.kept:
            return HELPS, f"beside {' and '.join(added.base)}" if added else "alone"
        return (
            (added.verdict, f"beside {' and '.join(added.base)}") if added else (UNPROVEN, "it was not tried")
        )


def choose_defaults(
    shapes: Mapping[str, Shape], order: Sequence[str], by_name: Collection[str] = ()
) -> tuple[tuple[str, ...], list[str]]:
    """The switches of a card, which has one set of them for all models, and a sentence for each that is not among them.

    One is taken that is kept for a shape and harms none, and that was measured to the end with all. Those of `by_name`
    are measured, and left to whoever wants other vectors for their speed.
    """
    chosen, reasons = [], []
    for name in order:
        if name in by_name:
            reasons.append(f"{name} is off unless it is asked for by name: it gives other vectors.")
            continue
        judged = {shape: found.judge(name) for shape, found in shapes.items() if name in found.alone}
        flaws = [
            f"{shape}: {FLAWS[verdict]} ({reason})"
            for shape, (verdict, reason) in judged.items()
            if verdict in FLAWS
        ]
        if flaws:
            reasons.append(f"{name} is off: {'; '.join(flaws)}.")
        elif any(verdict == HELPS for verdict, _ in judged.values()):
            chosen.append(name)
        elif judged:
            reasons.append(f"{name} is off: it brings less than {LEAST_GAIN:.0%} beyond the spread.")
        else:
            reasons.append(f"{name} is off: it cannot be tried here.")
    return tuple(chosen), reasons
