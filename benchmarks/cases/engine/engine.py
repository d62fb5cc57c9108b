"""engine: several mixes of texts, encoded by our service, our engine alone and peers, which take turns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.cases.comparing import compare, list_reasons
from benchmarks.cases.engine import shapes
from benchmarks.cases.engine.engine_targets import judge_engine
from benchmarks.cases.engine.pass_length import estimate_seconds, lengthen
from benchmarks.mixes import CHINESE, LENGTHENED, NUM_TEXTS, Mix, make_mix, plan_sizes
from benchmarks.models.same_limit import copy_with_limit
from benchmarks.order import CPU, BenchmarkFailed, Order
from benchmarks.peers.catalogue import PEERS, SENTENCE_TRANSFORMERS
from benchmarks.peers.environment import prepare_texts
from benchmarks.probes.machine import benchmark_device
from benchmarks.probes.matrix_rate import measure_matrix_rates
from benchmarks.results.comparison import Comparison
from benchmarks.results.report import Report
from benchmarks.results.writing import write_number
from benchmarks.systems.line_up import BOUNDS, OURS, LineUp
from benchmarks.systems.turns import Record, Turns
from vectormill.cli.stack import workplace
from vectormill.models.model_card import ModelCard, read_model_card
from vectormill.models.registry import DEFAULT_MODEL, Registry

SYSTEMS: Final = (*OURS, *BOUNDS, *(peer.name for peer in PEERS))


def measure(order: Order) -> Report:
    if order.device != CPU or order.shapes:
        return shapes.measure(order)
    names = list(order.mixes or NUM_TEXTS)
    num_systems = len(order.systems or SYSTEMS)
    order.steps.begin("engine", 2 + Turns.count_steps(num_systems, len(names), order.repeat) + 1)
    order.steps.step("collecting texts")
    mixes, notes = make_mixes(names, order.items)
    with workplace(None) as directory:
        packaged = Registry({}).card(DEFAULT_MODEL, weights=True)
        # Named by what it is and reads: what peers convert is kept under this name.
        name = f"{packaged.revision}-{order.max_tokens or packaged.max_tokens}"
        model = copy_with_limit(packaged, directory / "models" / name, order.max_tokens)
        card = read_model_card(packaged.name, model)
        if order.items is None:
            mixes = [
                lengthen(mix, card, order.machine.matrix_rates) if mix.name in LENGTHENED else mix
                for mix in mixes
            ]
        seconds = estimate_seconds(
            mixes, card, order.systems or SYSTEMS, order.repeat, order.machine.matrix_rates
        )
        order.steps.step(
            f"installing what is missing of the peers; the passes take about {seconds / 60:.0f} minutes"
        )
        systems = LineUp(directory, model, mixes, benchmark_device()).make(order.systems, PEERS, BOUNDS)
        results: dict[str, dict[str, Record]] = {}
        with Turns(systems, order.steps.step) as turns:
            for mix in mixes:
                results[mix.name] = turns.run(mix.name, order.repeat)
            for _ in range(len(names) - len(mixes)):
                skip_steps(order, num_systems)
        order.steps.step("measuring again what the processor can do")
        limits = find_limits(order)
        comparisons = [compare(mix, card, results[mix.name], limits, SENTENCE_TRANSFORMERS) for mix in mixes]
    return make_report(order, card, comparisons, limits, notes)


def make_mixes(names: Sequence[str], items: int | None) -> tuple[list[Mix], list[str]]:
    """The mixes that can be had, and a sentence for each other one."""
    mixes, notes, chinese = [], [], Path()
    for name, num_texts in plan_sizes(names, items).items():
        try:
            if name == CHINESE:
                chinese = prepare_texts()
            mixes.append(make_mix(name, num_texts, chinese))
        except (BenchmarkFailed, LookupError) as error:
            notes.append(f"The mix {name} is missing: {error}")
    return mixes, notes


def skip_steps(order: Order, num_systems: int) -> None:
    """Those of a mix that is missing were announced too."""
    for _ in range(num_systems * (1 + order.repeat)):
        order.steps.step("left out")


def find_limits(order: Order) -> dict[str, float]:
    """The rates before and after the passes, the faster of each: another guest of the machine may have slowed one."""
    again = measure_matrix_rates(benchmark_device())
    return {precision: max(rate, again[precision]) for precision, rate in order.machine.matrix_rates.items()}


def make_report(
    order: Order,
    card: ModelCard,
    comparisons: Sequence[Comparison],
    limits: Mapping[str, float],
    notes: Sequence[str],
) -> Report:
    if not comparisons:
        raise BenchmarkFailed(" ".join(notes))
    rates = ", ".join(f"{precision} {write_number(rate)} GFLOP/s" for precision, rate in limits.items())
    targets = judge_engine(comparisons)
    kinds = "; ".join(f"{each.mix}: {each.description}" for each in comparisons)
    return Report(
        "engine",
        f"{card.name}, the first {card.max_tokens} tokens of a text, {order.repeat} passes of each.",
        tuple(table for table in (*(each.to_table() for each in comparisons), targets) if table.rows),
        (
            f"The mixes: {kinds}.",
            "Median of all passes, smallest and largest in brackets. The peer is sentence-transformers with its "
            "defaults: fp32, batches of 32. Ratios are taken repetition by repetition.",
            "Tokens are real ones, counted once for all systems; padding is the share of the computed tokens beyond "
            f"them. The share of the limit is by the rate of a matrix product in the system's precision: {rates}.",
            "The bare loop is openvino alone with the batches that our engine had just formed, in as many streams: "
            "nothing is tokenized, padded, looked up or sent while its clock runs, and results are thrown away.",
            "infinity's torch engine is given padded batches, which is what is counted, and leaves most of the padding "
            "out inside.",
            "Memory is resident, at its peak: of the encoding process, and for ours with the worker that tokenizes and "
            "commits. Cosines are to the peer's vectors, over all texts of the mix.",
            *list_reasons(comparisons),
            *notes,
        ),
    )
