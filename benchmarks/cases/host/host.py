"""host: what the host spends on a text, with a device that costs nothing; `--against` one more checkout."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.cases.host.bench import Bench
from benchmarks.cases.host.host_tables import (
    BEFORE,
    NOW,
    Results,
    judge,
    tabulate_micros,
    tabulate_rates,
    tabulate_stages,
)
from benchmarks.cases.host.host_texts import HostTexts
from benchmarks.cases.host.measured import Measured
from benchmarks.cases.host.timed import count_steps, measure_timed
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.results.report import Report
from benchmarks.results.table import Table, tabulate
from benchmarks.systems.host.devices import KINDS
from benchmarks.systems.host.tree import ROOT
from vectormill.cli.stack import workplace
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import DEFAULT_MODEL, Registry

# Tokens of a text -> texts of a pass, some ten seconds when this was written.
NUM_TEXTS: Final[Mapping[int, int]] = {16: 100_000, 100: 40_000, 256: 20_000}
FEWEST_TEXTS: Final = 2_000
NUM_KINDS: Final = 3
# Two passes of the same thing differed by half.
FEWEST_PASSES: Final = 3

NOTES: Final = (
    "Texts a second: end to end from the first chunk's claim to the last commit, the submission before it; the engine "
    "alone with as many chunks of 512 at a time as a worker has slots; the tokenizer's encode_batch_fast of 512 texts, "
    "with a thread on every core.",
    "Processor time is user and system time of whole processes, the submission of the job included; cores busy is that "
    "of all processes since the submission, by the seconds from claim to commit.",
    "The worker's own tokenizer is that of the checkout, word by word where it is exact: what is subtracted from the "
    "worker's processor time, pass by pass.",
    "Stages are the job's own: seconds of threads, of which some wait for the interpreter's lock.",
    "Bytes in the pipe are those that the model's process wrote for a text (wchar of /proc), and bytes read those that "
    "the engine's process read: what lies in memory that both see is not among them. Blocks are Python's own blocks of "
    "memory for each text in flight, at their peak (sys.getallocatedblocks every 5 ms, in a pass of its own).",
    "A made-up device computes for as long as the arithmetic of a batch takes, by worker/placement/sizes/speed.py, and "
    f"queues the next one behind it. Assumed, not measured: {'; '.join(each.describe() for each in KINDS.values())}.",
    "Two workers are two Celery workers with half of the cores each, on one made-up device. For a real one the "
    "launcher has no such thing: it starts a worker for each replica of the model, and no device is named twice.",
)


def measure(order: Order) -> Report:
    if order.repeat < FEWEST_PASSES:
        raise BenchmarkFailed(
            f"host: {order.repeat} passes say nothing, for passes differ by half; give --repeat "
            f"{FEWEST_PASSES} or more, and --items for shorter ones."
        )
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    trees = {NOW: ROOT, **({BEFORE: order.against} if order.against else {})}
    sizes = plan_sizes(order.items)
    num_passes = len(trees) * len(sizes) * (NUM_KINDS * order.repeat + 1)
    order.steps.begin("host", 1 + len(trees) + num_passes + count_steps(len(sizes), order.repeat))
    order.steps.step("making texts")
    texts = HostTexts(card.path)
    with workplace(None) as directory:
        results = measure_null(order, card, texts, sizes, trees, directory)
        timed = measure_timed(order, texts, sizes, directory, card.path)
    return make_report(order, card, results, timed)


def measure_null(
    order: Order,
    card: ModelCard,
    texts: HostTexts,
    sizes: Mapping[int, int],
    trees: Mapping[str, Path],
    directory: Path,
) -> Results:
    """The checkouts in turns, each with its stack, its engine alone and the bare tokenizer."""
    results = {num_tokens: {name: Measured() for name in trees} for num_tokens in sizes}
    benches: dict[str, Bench] = {}
    with ExitStack() as exits:
        for name, tree in trees.items():
            order.steps.step(f"starting the stack of {name}")
            benches[name] = exits.enter_context(Bench(name, tree, directory / name, card))
        for num_tokens, num_texts in sizes.items():
            for number in range(order.repeat):
                for name, bench in benches.items():
                    found, say = results[num_tokens][name], f"{num_tokens} tokens, {name}, pass {number + 1}"
                    order.steps.step(f"{say}: end to end")
                    bench.run_job(texts.draw(num_tokens, num_texts), found)
                    order.steps.step(f"{say}: the engine alone")
                    bench.run_engine(texts.draw(num_tokens, num_texts), found)
                    order.steps.step(f"{say}: the bare tokenizer")
                    bench.run_tokenizer(texts.draw(num_tokens, num_texts), found)
            for name, bench in benches.items():
                order.steps.step(f"{num_tokens} tokens, {name}: counting the engine's blocks")
                bench.count_blocks(texts.draw(num_tokens, num_texts // 4), results[num_tokens][name])
    return results


def make_report(order: Order, card: ModelCard, results: Results, timed: Table) -> Report:
    num_cores = len(os.sched_getaffinity(0))
    measures = judge(results, num_cores)
    return Report(
        "host",
        f"texts of {', '.join(map(str, results))} tokens, no two equal; {card.name}, a device that takes no time, "
        f"{num_cores} cores, {order.repeat} passes of each in turn.",
        (
            *((tabulate(measures),) if measures else ()),
            tabulate_rates(results, num_cores),
            tabulate_micros(results),
            tabulate_stages(results),
            timed,
        ),
        NOTES,
    )


def plan_sizes(items: int | None) -> dict[int, int]:
    """Texts of a pass by their tokens: the usual ones, or in proportion to `items` of the shortest."""
    if items is None:
        return dict(NUM_TEXTS)
    share = items / max(NUM_TEXTS.values())
    return {tokens: max(FEWEST_TEXTS, round(number * share)) for tokens, number in NUM_TEXTS.items()}
