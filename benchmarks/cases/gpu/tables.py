"""The tables of the first hour on a card, from its records. Measures nothing and decides nothing."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.cases.gpu.choosing import Pair, Shape, Timed
from benchmarks.cases.gpu.driver import shorten
from benchmarks.cases.gpu.plan import BESIDE, BUDGETS, HOST, RATES, TESTS, Step
from benchmarks.cases.gpu.state import DONE, State
from benchmarks.results.spread import Spread
from benchmarks.results.table import Table
from benchmarks.results.writing import (
    write_mebibytes,
    write_number,
    write_ratio,
    write_seconds,
    write_share,
)

GIGA: Final = 1e9
NONE: Final = "–"


def tabulate_steps(plan: Sequence[Step], state: State) -> Table:
    """How each ended; of those that did not, why."""
    rows = []
    for step in plan:
        record = state.find(step.name)
        limit = write_seconds(step.limit_seconds)
        if record is not None:
            reason = shorten(record.reason)
            rows.append((step.name, record.outcome, write_seconds(record.seconds), limit, reason))
        else:
            rows.append((step.name, "left out" if step.obstacle else "to do", "", limit, step.obstacle))
    return Table(("step", "ended", "took", "at most", "because"), tuple(rows))


def tabulate_models(shapes: Mapping[str, Shape], rates: Mapping[str, float]) -> Table:
    """One row a shape and length: without a switch, and with those that are kept together."""
    rows = []
    for shape, found in shapes.items():
        plain = next((pair for pair in found.alone.values() if pair is not None), None)
        best = find_best(found)
        for length, timed in plain.by_length.items() if plain else ():
            base = Spread.of([timed.num_tokens / seconds for seconds in timed.base_seconds])
            with_best = best.by_length[length] if best else None
            rate = Spread.of([timed.num_tokens / s for s in with_best.seconds]) if with_best else None
            limit = GIGA * rates.get(plain.precision, max(rates.values(), default=0.0)) if plain else 0.0
            rows.append(
                (
                    f"{shape}, {length} tokens",
                    base.describe(write_number),
                    write_limit_share(timed, timed.base_seconds, limit),
                    write_mebibytes(plain.base_bytes) if plain else NONE,
                    ", ".join(found.together.kept) if found.together and best else NONE,
                    rate.describe(write_number) if rate else NONE,
                    write_limit_share(with_best, with_best.seconds, limit) if with_best else NONE,
                    write_mebibytes(best.num_bytes) if best else NONE,
                )
            )
    header = (
        "text of", "plain, tokens/s", "of the matrix rate", "peak", "with", "tokens/s", "of the matrix rate", "peak",
    )  # fmt: skip
    return Table(header, tuple(rows))


def find_best(found: Shape) -> Pair | None:
    """The pair whose second side has all switches that are kept; None where none is, or it is not known yet."""
    if found.together is None or not found.together.kept:
        return None
    pairs = [pair for pair in (*found.alone.values(), *found.together.pairs) if pair is not None]
    return next((pair for pair in pairs if (*pair.base, pair.added) == found.together.kept), None)


def write_limit_share(timed: Timed, seconds: Sequence[float], limit: float) -> str:
    """Of the matrix rate [FLOP/s]."""
    return write_share(timed.flop / Spread.of(seconds).median / limit) if limit else NONE


def tabulate_switches(shapes: Mapping[str, Shape]) -> Table:
    """One row a pair that was measured: how many times faster with the switch than without, by the texts' tokens."""
    rows = []
    for shape, found in shapes.items():
        together = found.together.pairs if found.together else ()
        for pair in (*(pair for pair in found.alone.values() if pair), *together):
            beside = f" beside {', '.join(pair.base)}" if pair.base else ""
            ratios = "; ".join(
                f"{length}: {timed.ratio.describe(write_ratio)}" for length, timed in pair.by_length.items()
            )
            rows.append((f"{shape}: {pair.added}{beside}", ratios, f"{pair.gain:+.1%}", pair.verdict))
    return Table(("switch", "times as fast, by tokens of a text", "in the mean", "which"), tuple(rows))


def tabulate_budgets(plan: Sequence[Step], state: State) -> Table:
    rows = []
    for step, result in list_results(plan, state, BUDGETS):
        rates = {int(size): Spread.of(values).median for size, values in result["rates"].items() if values}
        tuner = result.get("tuner")
        rows.append(
            (
                f"{step.shape}, {result['length']} tokens",
                "; ".join(f"{size:,}: {write_number(rate)}" for size, rate in rates.items()),
                f"{result['knee']:,}",
                f"{tuner['max_batch_tokens']:,} ({tuner['state']})" if tuner else NONE,
                write_number(tuner["rate"]) if tuner else NONE,
            )
        )
    header = ("text of", "tokens/s by tokens of a batch", "knee", "the tuner's", "the engine's tokens/s")
    return Table(header, tuple(rows))


def tabulate_beside(plan: Sequence[Step], state: State) -> Table:
    """Ours first; the ratio is ours to the row's."""
    rows = []
    for step, result in list_results(plan, state, BESIDE):
        systems: Mapping[str, Mapping[str, Any]] = result["systems"]
        ours, *_ = systems.values()
        for system in systems.values():
            name = f"{step.shape}: {system['name']}"
            if not system["seconds"]:
                reason = shorten(system["failure"] or "it ended without a pass")
                rows.append((name, f"not measured: {reason}", "", "", "", ""))
                continue
            texts = Spread.of([result["num_texts"] / seconds for seconds in system["seconds"]])
            # All had the same texts: counted once for all, since some count special tokens and some do not.
            tokens = ours["num_tokens"] / Spread.of(system["seconds"]).median
            pairs = zip(system["seconds"], ours["seconds"], strict=False)
            ratios = [theirs / own for theirs, own in pairs]
            rows.append(
                (
                    name,
                    texts.describe(write_number),
                    write_number(tokens),
                    write_share(system["padding"]),
                    Spread.of(ratios).describe(write_ratio) if ratios else NONE,
                    write_mebibytes(system["peak_bytes"]),
                )
            )
    header = ("mixed lengths", "texts/s", "tokens/s", "padding", "ours is faster", "peak memory")
    return Table(header, tuple(rows))


def tabulate_host(plan: Sequence[Step], state: State, shapes: Mapping[str, Shape]) -> Table:
    """`of the device's own` is by the trials, which tokenize nothing."""
    rows = []
    for step, result in list_results(plan, state, HOST):
        found = shapes.get(step.shape)
        best = find_best(found) if found else None
        plain = next((pair for pair in found.alone.values() if pair), None) if found else None
        for length, measured in result["by_length"].items():
            texts = Spread.of([measured["num_texts"] / seconds for seconds in measured["seconds"]])
            tokens = measured["num_tokens"] / Spread.of(measured["seconds"]).median
            own = (best or plain).by_length.get(int(length)) if best or plain else None  # type: ignore[union-attr]
            seconds = (own.seconds if best else own.base_seconds) if own else ()
            run = measured["stage_seconds"].get("run", 0.0)
            rows.append(
                (
                    f"{step.shape}, {length} tokens",
                    texts.describe(write_number),
                    write_number(tokens),
                    write_share(tokens * Spread.of(seconds).median / own.num_tokens) if own else NONE,
                    write_share(measured["busy_share"]),
                    write_share(run / measured["seconds"][-1]),
                )
            )
    header = (
        "text of",
        "texts/s",
        "tokens/s",
        "of the device's own",
        "busy, says the driver",
        "busy, says the engine",
    )
    return Table(header, tuple(rows))


def list_results(plan: Sequence[Step], state: State, kind: str) -> list[tuple[Step, Mapping[str, Any]]]:
    """Of the steps of one kind, also of those that found a part before they were ended."""
    found = [(step, state.find(step.name)) for step in plan if step.kind == kind]
    return [(step, record.result) for step, record in found if record is not None and record.result]


def find_rates(state: State) -> dict[str, float]:
    """GFLOP/s of the matrix product by precision; empty before it was measured."""
    record = state.find(RATES)
    rates: dict[str, float] = dict(record.result.get("rates", {})) if record is not None else {}
    return rates


def describe_tests(state: State) -> list[str]:
    """One sentence, and one for each test that failed."""
    record = state.find(TESTS)
    if record is None or "counts" not in record.result:
        return []
    counts = ", ".join(f"{count} {name}" for name, count in record.result["counts"].items() if count)
    whole = "" if record.outcome == DONE else f" ({record.outcome} before its end)"
    failures = record.result["failures"].items()
    return [
        f"Tests of the card: {counts or 'none'}{whole}.",
        *(f"{name} failed: {why}" for name, why in failures),
    ]
