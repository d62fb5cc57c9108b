"""What `engine` is to reach, and whether it was reached. Knows tables alone, not how they were measured."""

from collections.abc import Sequence
from typing import Final

from benchmarks.mixes import DOCUMENTS, PARAGRAPHS, SHORT_JOB
from benchmarks.results.comparison import Comparison
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import write_cosine, write_ratio, write_share
from benchmarks.systems.line_up import ENGINE, OURS, SERVICE

PEER_TARGET: Final = 6.0
FASTEST_PEER_TARGET: Final = 1.5
COSINE_TARGET: Final = 0.999
LIMIT_TARGET: Final = 0.85
END_TO_END_TARGET: Final = 0.95
PADDING_TARGET: Final = 0.03
MEMORY_TARGET: Final = 0.6
SHORT_JOB_TARGET: Final = 0.93


def judge_engine(comparisons: Sequence[Comparison]) -> Table:
    """One row per target that what was measured has something to say of."""
    measures: list[Measure] = []
    for comparison in comparisons:
        if comparison.mix == PARAGRAPHS:
            measures += judge_speed(comparison)
        measures += judge_padding(comparison)
        if comparison.mix == DOCUMENTS:
            measures += judge_memory(comparison)
    return tabulate([*measures, *judge_short_job(comparisons), *judge_closeness(comparisons)])


def judge_speed(comparison: Comparison) -> list[Measure]:
    mix, measures = comparison.mix, []
    service, engine = comparison.measured(SERVICE), comparison.measured(ENGINE)
    peer, fastest = comparison.measured(comparison.peer), find_fastest_peer(comparison)
    if service and peer:
        ratio = service.speed_against(peer)
        target = f"≥ {PEER_TARGET:g}×"
        measures.append(
            Measure(
                f"{mix}: end to end, to {peer.name}",
                ratio.describe(write_ratio),
                target,
                ratio.median >= PEER_TARGET,
            )
        )
    if service and fastest:
        rival = comparison.records[fastest]
        ratio = service.speed_against(rival)
        measures.append(
            Measure(
                f"{mix}: end to end, to the fastest peer with cosine ≥ {COSINE_TARGET} ({rival.name})",
                ratio.describe(write_ratio),
                f"≥ {FASTEST_PEER_TARGET:g}×",
                ratio.median >= FASTEST_PEER_TARGET,
            )
        )
    share = comparison.limit_share(ENGINE)
    if share is not None:
        name = f"{mix}: our engine, of the matrix limit"
        measures.append(Measure(name, write_share(share), f"≥ {LIMIT_TARGET:.0%}", share >= LIMIT_TARGET))
    if service and engine:
        ratio = service.speed_against(engine)
        measures.append(
            Measure(
                f"{mix}: end to end, to our engine alone",
                ratio.describe(write_ratio),
                f"≥ {END_TO_END_TARGET:g}×",
                ratio.median >= END_TO_END_TARGET,
            )
        )
    return measures


def judge_short_job(comparisons: Sequence[Comparison]) -> list[Measure]:
    """Tokens a second of a job of some seconds, by those of a long one of the same texts."""
    by_mix = {comparison.mix: comparison for comparison in comparisons}
    if not {PARAGRAPHS, SHORT_JOB} <= by_mix.keys():
        return []
    measures = []
    for key in (SERVICE, ENGINE):
        short, long = by_mix[SHORT_JOB].measured(key), by_mix[PARAGRAPHS].measured(key)
        if short and long:
            rate = short.rate(by_mix[SHORT_JOB].num_tokens).median
            share = rate / long.rate(by_mix[PARAGRAPHS].num_tokens).median
            name = f"a short job, to a long one, {short.name}"
            measures.append(
                Measure(name, write_share(share), f"≥ {SHORT_JOB_TARGET:.0%}", share >= SHORT_JOB_TARGET)
            )
    return measures


def find_fastest_peer(comparison: Comparison) -> str | None:
    """The key of the peer with most texts/s among those whose vectors are near enough to fp32."""
    rates = {}
    for key in comparison.records:
        record, closeness = comparison.measured(key), comparison.closeness(key)
        if key not in OURS and record and closeness and closeness.smallest >= COSINE_TARGET:
            rates[key] = record.rate(comparison.num_texts).median
    return max(rates, key=rates.__getitem__, default=None)


def judge_padding(comparison: Comparison) -> list[Measure]:
    record = comparison.measured(SERVICE) or comparison.measured(ENGINE)
    if record is None:
        return []
    waste = max(done.padding_waste for done in record.passes)
    name = f"{comparison.mix}: padding, {record.name}"
    return [Measure(name, write_share(waste), f"≤ {PADDING_TARGET:.0%}", waste <= PADDING_TARGET)]


def judge_memory(comparison: Comparison) -> list[Measure]:
    """The worker's processes against the peer's one, both with the model and a full batch in them."""
    service, peer = comparison.measured(SERVICE), comparison.measured(comparison.peer)
    if service is None or peer is None:
        return []
    saved = 1 - service.whole_peak_bytes / peer.whole_peak_bytes
    name = f"{comparison.mix}: peak memory of the worker, below {peer.name}"
    return [Measure(name, write_share(saved), f"≥ {MEMORY_TARGET:.0%}", saved >= MEMORY_TARGET)]


def judge_closeness(comparisons: Sequence[Comparison]) -> list[Measure]:
    """Over all mixes: one text whose vector is far off is a wrong answer, however many are right."""
    found = [found for each in comparisons if (found := each.closeness(SERVICE)) is not None]
    if not found:
        return []
    smallest = min(each.smallest for each in found)
    name = "smallest cosine of a committed vector to fp32, all mixes"
    return [Measure(name, write_cosine(smallest), f"≥ {COSINE_TARGET}", smallest >= COSINE_TARGET)]
