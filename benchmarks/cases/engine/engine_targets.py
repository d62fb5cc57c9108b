"""What `engine` is to reach, a row each, and whether it was reached. Knows tables alone, not how they were measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.mixes import DOCUMENTS, LENGTHENED, PARAGRAPHS, QUERIES, SHORT_JOB
from benchmarks.peers.catalogue import SENTENCE_TRANSFORMERS
from benchmarks.results.comparison import Comparison
from benchmarks.results.spread import Spread
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import write_cosine, write_ratio, write_share
from benchmarks.systems.line_up import BARE, BOUNDS, ENGINE, OURS, SERVICE

# Vectors of a peer that are further from fp32 are not the same work.
SAME_WORK_COSINE: Final = 0.999

Comparisons = Mapping[str, Comparison]  # by mix


@dataclass(frozen=True, slots=True)
class Unit:
    """How a value is written, and how the bound that it has to keep."""

    write: Callable[[float], str]
    write_bound: Callable[[float], str]


RATIO: Final = Unit(write_ratio, lambda bound: f"{bound:g}×")
SHARE: Final = Unit(write_share, lambda bound: f"{bound:.0%}")
COSINE: Final = Unit(write_cosine, lambda bound: f"{bound:g}")


@dataclass(frozen=True, slots=True)
class Found:
    """A value, and of what it is. A target is judged by its median."""

    name: str
    value: Spread


@dataclass(frozen=True, slots=True)
class Target:
    """`find` has nothing to say where a system or a mix was not measured. A bound is the least, or with `is_most` the
    most, that is good.
    """

    bound: float
    unit: Unit
    find: Callable[[Comparisons], Iterator[Found]]
    is_most: bool = False

    def judge(self, comparisons: Comparisons) -> Iterator[Measure]:
        sign = "≤" if self.is_most else "≥"
        for found in self.find(comparisons):
            median = found.value.median
            yield Measure(
                found.name,
                found.value.describe(self.unit.write),
                f"{sign} {self.unit.write_bound(self.bound)}",
                median <= self.bound if self.is_most else median >= self.bound,
            )


def judge_engine(comparisons: Sequence[Comparison]) -> Table:
    """One row per target that what was measured has something to say of."""
    by_mix = {comparison.mix: comparison for comparison in comparisons}
    return tabulate([measure for target in TARGETS for measure in target.judge(by_mix)])


def find_ratio(
    comparisons: Comparisons, mixes: Sequence[str], left: str, right: str, words: str
) -> Iterator[Found]:
    """How many times as fast one system is as another, repetition by repetition; the words name the other."""
    for mix, comparison in _pick(comparisons, mixes):
        ours, theirs = comparison.measured(left), comparison.measured(right)
        if ours and theirs:
            name = f"{mix}: {words.format(name=theirs.name)}"
            yield Found(name, ours.speed_against(theirs))


def find_fastest_ratio(comparisons: Comparisons, mixes: Sequence[str]) -> Iterator[Found]:
    for mix, comparison in _pick(comparisons, mixes):
        fastest = find_fastest_peer(comparison)
        if fastest is not None:
            words = f"end to end, to the fastest peer with cosine ≥ {SAME_WORK_COSINE} ({{name}})"
            yield from find_ratio(comparisons, (mix,), SERVICE, fastest, words)


def find_fastest_peer(comparison: Comparison) -> str | None:
    """The key of the peer with most texts/s among those whose vectors are near enough to fp32."""
    rates = {}
    for key in comparison.records:
        record, closeness = comparison.measured(key), comparison.closeness(key)
        is_peer = key not in (*OURS, *BOUNDS)
        if is_peer and record and closeness and closeness.smallest >= SAME_WORK_COSINE:
            rates[key] = record.rate(comparison.num_texts).median
    return max(rates, key=rates.__getitem__, default=None)


def find_limit_share(comparisons: Comparisons, mixes: Sequence[str]) -> Iterator[Found]:
    for mix, comparison in _pick(comparisons, mixes):
        share = comparison.limit_share(ENGINE)
        if share is not None:
            yield Found(f"{mix}: our engine, of the matrix limit", Spread.of([share]))


def find_short_share(comparisons: Comparisons) -> Iterator[Found]:
    """Tokens a second of a job of some seconds, by those of a long one of the same texts."""
    if not {PARAGRAPHS, SHORT_JOB} <= comparisons.keys():
        return
    for key in OURS:
        short, long = (comparisons[mix].measured(key) for mix in (SHORT_JOB, PARAGRAPHS))
        if short and long:
            rate = long.rate(comparisons[PARAGRAPHS].num_tokens).median
            shares = [count / rate for count in short.rates(comparisons[SHORT_JOB].num_tokens)]
            yield Found(f"a short job, to a long one, {short.name}", Spread.of(shares))


def find_padding(comparisons: Comparisons) -> Iterator[Found]:
    for mix, comparison in comparisons.items():
        record = comparison.measured(SERVICE) or comparison.measured(ENGINE)
        if record is not None:
            waste = max(done.padding_waste for done in record.passes)
            yield Found(f"{mix}: padding, {record.name}", Spread.of([waste]))


def find_saved_memory(comparisons: Comparisons, mixes: Sequence[str]) -> Iterator[Found]:
    """The worker's processes against the peer's one, both with the model and a full batch in them."""
    for mix, comparison in _pick(comparisons, mixes):
        service, peer = comparison.measured(SERVICE), comparison.measured(comparison.peer)
        if service and peer:
            saved = 1 - service.whole_peak_bytes / peer.whole_peak_bytes
            yield Found(f"{mix}: peak memory of the worker, below {peer.name}", Spread.of([saved]))


def find_closeness(comparisons: Comparisons) -> Iterator[Found]:
    """Over all mixes: one text whose vector is far off is a wrong answer, however many are right."""
    found = [found for each in comparisons.values() if (found := each.closeness(SERVICE)) is not None]
    if found:
        smallest = min(each.smallest for each in found)
        yield Found("smallest cosine of a committed vector to fp32, all mixes", Spread.of([smallest]))


def _pick(comparisons: Comparisons, mixes: Sequence[str]) -> Iterator[tuple[str, Comparison]]:
    return ((mix, comparisons[mix]) for mix in mixes if mix in comparisons)


def _ratio(bound: float, mixes: Sequence[str], left: str, right: str, words: str) -> Target:
    return Target(bound, RATIO, partial(find_ratio, mixes=mixes, left=left, right=right, words=words))


TARGETS: Final = (
    _ratio(6.0, (PARAGRAPHS,), SERVICE, SENTENCE_TRANSFORMERS, "end to end, to {name}"),
    Target(1.8, RATIO, partial(find_fastest_ratio, mixes=(PARAGRAPHS, QUERIES))),
    Target(1.2, RATIO, partial(find_fastest_ratio, mixes=(DOCUMENTS,))),
    Target(0.75, SHARE, partial(find_limit_share, mixes=(PARAGRAPHS,))),
    _ratio(0.97, LENGTHENED, ENGINE, BARE, "our engine, of the bare loop on its shapes"),
    _ratio(0.96, LENGTHENED, SERVICE, ENGINE, "end to end, to our engine alone"),
    Target(0.93, SHARE, find_short_share),
    Target(0.03, SHARE, find_padding, is_most=True),
    Target(0.6, SHARE, partial(find_saved_memory, mixes=(DOCUMENTS,))),
    Target(0.999, COSINE, find_closeness),
)
