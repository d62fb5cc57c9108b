"""score: pairs of mixed lengths, judged by our service, our engine alone, the naive way and sentence-transformers.

Weights are random, in the shapes of StructBERT-large and of MiniLM: a forward pass takes as long whatever their values,
and its results mean nothing.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.cases.comparing import list_reasons
from benchmarks.cases.tasks.pair_comparison import PairComparison
from benchmarks.models.random_classifier import write_random_classifier
from benchmarks.models.shapes import SHAPES
from benchmarks.order import Order
from benchmarks.pair_texts import Pair, list_parts, make_pairs
from benchmarks.peers.catalogue import Peer, find_obstacle
from benchmarks.probes.machine import benchmark_device
from benchmarks.results.report import Report
from benchmarks.results.table import tabulate
from benchmarks.systems.pairs.pair_line_up import (
    INT8_ENGINE,
    NAIVE,
    PairLineUp,
    make_cross_encoder,
    make_naive,
)
from benchmarks.systems.turns import Record, Turns
from vectormill.cli.stack import workplace
from vectormill.models.model_card import ModelCard, read_model_card
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.encoder.choice import BF16
from worker.tokens.tokenizer import Tokenizer

NAME: Final = "score"
# Mixes: what is measured, and what CrossEncoder.predict's options are chosen on.
PAIRS: Final = "pairs"
SAMPLE: Final = "sample"
# Another seed than that of `accuracy`: nothing else is shared.
SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """How many pairs a shape judges in a pass, to choose options, and in the naive way, whose pairs cost the same."""

    title: str
    shape: str
    num_pairs: int
    num_sample: int
    num_naive: int


WORKLOADS: Final = (
    Workload("StructBERT-large's shape, random weights", "bert-large", 36, 16, 16),
    Workload("MiniLM's shape, random weights", "minilm", 480, 160, 48),
)
QUICK: Final = (Workload("a tiny shape, random weights", "tiny", 24, 12, 8),)

TORCH_BATCHES: Final = (4, 8, 16, 32)
OPENVINO_BATCHES: Final = (4, 16)
QUICK_BATCHES: Final = (8, 32)
# Of StructBERT-large on one GPU, in pairs a second: the reference, and the same after tuning, in so much less memory.
PUBLISHED: Final = (23, 28, 0.4)


def measure(order: Order) -> Report:
    workloads = QUICK if order.is_quick else WORKLOADS
    repeat = 1 if order.is_quick else order.repeat
    peers = list_variants(is_quick=order.is_quick)
    # Ours three times, the naive way and the peer at its best.
    each = 1 + Turns.count_steps(len(peers), 1, 1) + Turns.count_steps(5, 1, repeat)
    order.steps.begin(NAME, len(workloads) * each)
    return make_report(order, [measure_workload(order, each, peers, repeat) for each in workloads], repeat)


def list_variants(*, is_quick: bool) -> list[Peer]:
    """What CrossEncoder.predict offers: batch sizes, backends and, where the processor has instructions, bf16."""
    if is_quick:
        return [make_cross_encoder(size) for size in QUICK_BATCHES]
    half = [make_cross_encoder(size, precision=BF16) for size in OPENVINO_BATCHES]
    return [
        *(make_cross_encoder(size) for size in TORCH_BATCHES),
        *(make_cross_encoder(size, backend="openvino") for size in OPENVINO_BATCHES),
        *(peer for peer in half if find_obstacle(peer, benchmark_device()) is None),
    ]


def measure_workload(order: Order, workload: Workload, peers: Sequence[Peer], repeat: int) -> PairComparison:
    """In a directory of its own: a large model's files are gone before the next one's are written."""
    with workplace(None) as directory:
        # What peers export is kept under the model's name, which is another one in each run.
        name = f"random-{workload.shape}-{os.getpid()}"
        order.steps.step(f"writing random weights of the shape {workload.shape}")
        tokenizer = Registry({}).card(DEFAULT_MODEL).path
        model = write_random_classifier(SHAPES[workload.shape], tokenizer, directory / "models" / name)
        card = read_model_card(name, model)
        pairs = list_mixed(workload.num_pairs)
        sample = list_mixed(workload.num_sample)
        line_up = PairLineUp(directory, model, (), benchmark_device(), pairs={PAIRS: pairs, SAMPLE: sample})
        say = partial(say_of, order, workload)
        best = choose_best(line_up, peers, say)
        naive = make_naive(workload.num_naive)
        with Turns(line_up.make((), [INT8_ENGINE, naive, best]), say) as turns:
            records = turns.run(PAIRS, repeat)
        return PairComparison(workload.title, len(pairs), count_tokens(card, pairs), records, best.name)


def say_of(order: Order, workload: Workload, sentence: str) -> None:
    order.steps.step(f"{workload.shape}: {sentence}")


def choose_best(line_up: PairLineUp, peers: Sequence[Peer], say: Callable[[str], None]) -> Peer:
    """The one that judges the sample in the shortest time; the first where none can be had."""
    systems = line_up.make([peer.name for peer in peers], peers)
    with Turns(systems, say) as turns:
        records: Mapping[str, Record] = turns.run(SAMPLE, 1)
    seconds = {name: record.seconds()[0] for name, record in records.items() if record.passes}
    return min(peers, key=lambda peer: seconds.get(peer.name, float("inf")))


def list_mixed(num_pairs: int) -> list[Pair]:
    """So many pairs of all docstrings that have two parts; half of them do not belong together."""
    parts = [*list_parts(is_test=False), *list_parts(is_test=True)]
    return make_pairs(parts, num_pairs // 2, SEED)


def count_tokens(card: ModelCard, pairs: Sequence[Pair]) -> int:
    """Real tokens, cut as every system cuts them: the same count for all, so that rates compare."""
    tokenizer = Tokenizer(card.path, lowercase=card.lowercase)
    first, second = [pair.text for pair in pairs], [pair.text_pair for pair in pairs]
    return int(tokenizer.tokenize_pairs(first, second, card.max_tokens, truncate=True).lengths.sum())


def make_report(order: Order, comparisons: Sequence[PairComparison], repeat: int) -> Report:
    reference, tuned, saved = PUBLISHED
    return Report(
        NAME,
        f"pairs of docstrings' first sentences and what follows them, 512 tokens at most, {repeat} passes of each.",
        (
            *(each.to_table() for each in comparisons),
            tabulate([measure for each in comparisons for measure in each.judge()]),
        ),
        (
            "Weights are random: what is told is speed, memory and that all systems compute the same. What precision "
            "changes in real decisions is told by decision 0053.",
            "Median of all passes, smallest and largest in brackets; ratios are taken repetition by repetition. Tokens "
            "are real ones, counted once for all systems; padding is the share of the computed tokens beyond them.",
            "The naive way is fp32 with every pair padded to the limit, as the reference pipeline pads. It is timed on "
            + ", ".join(
                f"{describe_timed(each)} of the {each.num_pairs:,} pairs of {each.shape}"
                for each in comparisons
            )
            + ", since each of them costs the same.",
            f"CrossEncoder.predict sorts by length. Its batch size and backend are those that were the fastest on a "
            f"part of the pairs, of {', '.join(peer.title for peer in list_variants(is_quick=order.is_quick))}.",
            f"Published for StructBERT-large on one GPU: {reference} pairs/s by the reference, {tuned} when tuned, "
            f"in {saved:.0%} less memory. It is another machine's: only ratios compare.",
            "Memory is resident, at its peak: of the judging process, and for ours with the worker that tokenizes and "
            "commits. The largest difference is that of a probability to the naive reference's.",
            *list_reasons(comparisons),
        ),
    )


def describe_timed(comparison: PairComparison) -> str:
    naive = comparison.measured(NAIVE)
    return "none" if naive is None or naive.vectors is None else f"{len(naive.vectors):,}"
