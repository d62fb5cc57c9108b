"""score: pairs of mixed lengths, scored by our service, our engine alone and the peer's CrossEncoder.

Weights are random, in the shapes of StructBERT-large and MiniLM: the time of a forward pass does not depend
on values.
"""

import os
from typing import Any, Final

import numpy as np

from benchmarks.harness import Harness
from benchmarks.machine import benchmark_device
from benchmarks.models import SHAPES, write_random_model
from benchmarks.ours import ENGINE, SERVICE, LineUp, list_items
from benchmarks.peers import SENTENCE_TRANSFORMER, Peer, find_obstacle
from benchmarks.tables import MEBIBYTES, NUMBER, RATIO, SHARE, Measure, Report, Table, at_least, tabulate
from benchmarks.texts import list_pairs
from benchmarks.turns import System, Turns
from vectormill.cli.stack import workplace
from vectormill.client import Client
from worker.encoder.choice import BF16, FP32, INT8
from worker.tokens.tokenizer import Tokenizer

PAIRS: Final = "pairs"
SAMPLE: Final = "sample"
PEER: Final = "cross-encoder"
INT8_ENGINE: Final = "engine-int8"
# Title, shape, number of pairs per pass, and number in the sample on which the peer's options are chosen.
WORKLOADS: Final = (
    ("StructBERT-large's shape, random weights", "bert-large", 36, 16),
    ("MiniLM's shape, random weights", "minilm", 480, 160),
)
QUICK: Final = (("a tiny shape, random weights", "tiny", 24, 12),)


def make_cross_encoder(batch_size: int, backend: str = "torch", precision: str = FP32) -> Peer:
    words = {"openvino": "OpenVINO, "}.get(backend, "bf16, " if precision == BF16 else "")
    return Peer(
        f"{PEER}-{backend}-{precision}-{batch_size}",
        f"CrossEncoder.predict, {words}batches of {batch_size}",
        SENTENCE_TRANSFORMER,
        environment="openvino" if backend == "openvino" else None,
        options={"task": PAIRS, "backend": backend, "batch_size": str(batch_size), "precision": precision},
        precision=precision,
    )


def list_variants(*, is_quick: bool) -> list[Peer]:
    """Return variants of CrossEncoder.predict: batch sizes, backends and, if the processor has it, bf16."""
    if is_quick:
        return [make_cross_encoder(size) for size in (8, 32)]
    half = [make_cross_encoder(size, precision=BF16) for size in (4, 16)]
    return [
        *(make_cross_encoder(size) for size in (4, 8, 16, 32)),
        *(make_cross_encoder(size, backend="openvino") for size in (4, 16)),
        *(peer for peer in half if find_obstacle(peer, benchmark_device()) is None),
    ]


def run(harness: Harness) -> Report:
    tables, measures, reasons = [], [], []
    for workload in QUICK if harness.is_quick else WORKLOADS:
        table, found, failed = measure_workload(harness, *workload)
        tables.append(table)
        measures += found
        reasons += failed
    variants = ", ".join(peer.title for peer in list_variants(is_quick=harness.is_quick))
    return Report(
        "pairs of docstrings' first sentences and what follows them, 512 tokens at most, "
        f"{harness.repeat} passes of each.",
        (*tables, tabulate(measures)),
        (
            "Weights are random: the figures show speed and memory, and that all systems compute the same.",
            "Median of all passes, smallest and largest in brackets; ratios are taken repetition by repetition. Tokens "
            "exclude padding and are counted once for all systems; padding is its share of the computed tokens.",
            "CrossEncoder.predict sorts by length. Its batch size and backend were the fastest on a part of the pairs, "
            f"among {variants}.",
            "The published figures for StructBERT-large on one GPU are 23 pairs/s for the reference, and 28 when "
            "tuned, in 40% less memory. They are from another machine: only ratios can be compared.",
            "Memory is the peak resident memory of the scoring process; ours includes the worker, which tokenizes and "
            "commits. The largest difference is between a probability and that of CrossEncoder.",
            *reasons,
        ),
    )


def measure_workload(
    harness: Harness, title: str, shape: str, num_pairs: int, num_sample: int
) -> tuple[Table, list[Measure], list[str]]:
    """Measure one workload in a directory of its own.

    A large model's files are deleted before the next one's are written.
    """
    with workplace(None) as directory:
        # Peers keep exports under the model's name, so the name is new in each run.
        card = write_random_model(
            SHAPES[shape], directory / "models" / f"random-{shape}-{os.getpid()}", num_labels=2
        )
        pairs = list_pairs(num_pairs)
        texts = {PAIRS: pairs, SAMPLE: list_pairs(num_sample)}
        line_up = LineUp(directory, card.path, texts, benchmark_device())
        lengths = Tokenizer(card.path, lowercase=card.lowercase).tokenize_pairs(
            [pair[0] for pair in pairs], [pair[1] for pair in pairs], card.max_tokens, truncate=True
        )
        peers = {peer.name: line_up.make_peer(peer) for peer in list_variants(is_quick=harness.is_quick)}
        with Turns(peers, harness) as turns:
            tried = turns.run(SAMPLE, 1)
        # The first variant when none could be measured.
        best = min(peers, key=lambda name: tried[name].seconds()[0] if tried.measured(name) else float("inf"))
        systems: dict[str, System] = {
            SERVICE: line_up.make_service(
                {name: [(list_items(each), {})] for name, each in texts.items()}, read=read
            ),
            ENGINE: line_up.make_engine(),
            INT8_ENGINE: line_up.make_engine("our engine alone, int8 weights", precision=INT8),
            PEER: peers[best],
        }
        with Turns(systems, harness) as turns:
            records = turns.run(PAIRS, harness.repeat)
    num_tokens = int(lengths.lengths.sum())
    peer = records.measured(PEER)

    def find_difference(vectors: Any) -> str:
        if peer is None or peer.vectors is None or vectors is None:
            return ""
        return f"{float(np.abs(vectors - peer.vectors).max()):.1e}"

    table = records.tabulate(
        f"{title}: {num_pairs:,} pairs, {num_tokens:,} tokens",
        {
            "pairs/s": lambda _, record: NUMBER(record.rate(num_pairs)),
            "tokens/s": lambda _, record: NUMBER(record.rate(num_tokens).median),
            "to CrossEncoder": lambda _, record: RATIO(record.speed_against(peer)) if peer else "",
            "padding": lambda _, record: SHARE(record.passes[-1].padding_waste),
            "peak memory": lambda _, record: MEBIBYTES(record.whole_peak_bytes),
            "largest difference": lambda _, record: find_difference(record.vectors),
        },
    )
    measures = [
        at_least(f"{title}: {records[key].name}, to {records[PEER].name}", ratio, 1.3, RATIO)
        for key in (SERVICE, ENGINE)
        if (ratio := records.speed(key, PEER))
    ]
    return table, measures, records.list_reasons()


def read(client: Client, job_id: str) -> list[tuple[str, Any]]:
    """Return the probabilities of a job's pairs with their keys."""
    return [(each["key"], list(each["probabilities"].values())) for each in client.scores(job_id)]
