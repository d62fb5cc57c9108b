"""engine: several mixes of texts, encoded in turns by our service, our engine alone and the peers.

With `--device cuda`, or with shapes, models of random weights encode texts of mixed lengths instead. There
the systems run one after the other, each alone on the device, so that all memory in use is its own.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Final

from benchmarks.harness import BenchmarkFailed, Harness
from benchmarks.machine import GIGA, benchmark_device, describe_rates, find_device, measure_matrix_rates
from benchmarks.models import (
    SHAPES,
    ModelCost,
    Shape,
    copy_with_limit,
    count_tokens,
    find_packaged,
    write_random_model,
)
from benchmarks.ours import ENGINE, OURS, SERVICE, LineUp
from benchmarks.peers import GPU_PEERS, OPENVINO, PEERS, SENTENCE_TRANSFORMERS, Peer, prepare_texts
from benchmarks.processes import PeakSampler
from benchmarks.tables import (
    COSINE,
    MEBIBYTES,
    NUMBER,
    RATIO,
    SHARE,
    Measure,
    Report,
    Spread,
    Table,
    at_least,
    at_most,
    tabulate,
)  # fmt: skip
from benchmarks.texts import (
    DOCUMENTS,
    MIXES,
    PARAGRAPHS,
    QUERIES,
    SHORT_JOB,
    Mix,
    list_mixed,
    make_mix,
    number_copies,
)  # fmt: skip
from benchmarks.turns import Record, Records, Turns
from vectormill.cli.stack import workplace
from vectormill.corpus import take_evenly
from vectormill.models.model_card import ModelCard
from worker.devices.detect import DeviceSampler
from worker.devices.device import CPU, CUDA, Device
from worker.encoder.choice import BF16, FP32, choose_precision
from worker.settings import load_worker_settings

# Mixes with speed targets are repeated until a pass takes this long: in a pass of ten seconds a job's start
# and end would be a tenth of the measured time.
LENGTHENED: Final = (PARAGRAPHS, QUERIES, DOCUMENTS)
PASS_SECONDS: Final = 30.0
EXPECTED_SHARE: Final = 0.75
MOST_COPIES: Final = 30
# A peer whose vectors differ more than this from fp32 does not do the same work.
SAME_WORK_COSINE: Final = 0.999
GPU_SHAPES: Final = ("bert-base", "bert-large", "qwen3-7b")
# The share of a GPU's matrix rate that our engine must reach, by model type.
GPU_TARGETS: Final[Mapping[str, float]] = {"bert": 0.55, "qwen3": 0.50}
MEMORY_PAUSE_SECONDS: Final = 0.2


class Comparison:
    """The results of several systems for one mix, relative to a peer and to the matrix rates in GFLOP/s."""

    def __init__(
        self, mix: Mix, card: ModelCard, records: Records, limits: Mapping[str, float], peer: str
    ) -> None:
        lengths = count_tokens(card, mix.texts)
        self.mix = mix
        self.records = records
        self.peer = peer
        self.num_texts = len(mix.texts)
        self.num_tokens = int(lengths.sum())
        self.flop = ModelCost.of(card).count_flop(lengths)
        self._limits = limits

    def limit_share(self, key: str) -> float | None:
        """Return the median share of the matrix rate in the system's precision; None if not measured.

        A precision without a rate, such as int8, is compared with the slowest rate.
        """
        record = self.records.measured(key)
        if record is None:
            return None
        limit = self._limits.get(find_precision(key, record), min(self._limits.values()))
        return record.rate(self.flop).median / (limit * GIGA)

    def to_table(self) -> Table:
        peer = self.records.measured(self.peer)

        def cosine(key: str, place: int) -> str:
            cosines = self.records.cosines(key, self.peer)
            return COSINE(cosines[place]) if cosines else ""

        return self.records.tabulate(
            f"{self.mix.name}: {self.num_texts:,} texts, {self.num_tokens:,} tokens",
            {
                "texts/s": lambda _, record: NUMBER(record.rate(self.num_texts)),
                "tokens/s": lambda _, record: NUMBER(record.rate(self.num_tokens).median),
                "to the peer": lambda _, record: RATIO(record.speed_against(peer)) if peer else "",
                "padding": lambda _, record: SHARE(record.passes[-1].padding_waste),
                "share of limit": lambda key, _: SHARE(self.limit_share(key) or 0.0),
                "peak memory": lambda _, record: MEBIBYTES(record.whole_peak_bytes),
                "min. cosine": lambda key, _: cosine(key, 0),
                "mean cosine": lambda key, _: cosine(key, 1),
            },
        )

    def find_fastest_peer(self) -> str | None:
        """Return the key of the fastest peer by texts/s among those with vectors close enough to fp32."""
        rates = {}
        for key in self.records:
            record, cosines = self.records.measured(key), self.records.cosines(key, self.peer)
            if key not in OURS and record and cosines and cosines[0] >= SAME_WORK_COSINE:
                rates[key] = record.rate(self.num_texts).median
        return max(rates, key=rates.__getitem__, default=None)


def run(harness: Harness) -> Report:
    if harness.device != CPU or harness.shapes:
        return run_shapes(harness)
    mixes, notes = make_mixes(harness)
    with workplace(None) as directory:
        packaged = find_packaged()
        # The name says which model it is and how much it reads, because peers keep converted models under it.
        name = f"{packaged.revision}-{harness.max_tokens or packaged.max_tokens}"
        card = copy_with_limit(packaged, directory / "models" / name, harness.max_tokens)
        if harness.items is None:
            mixes = [lengthen(mix, card, harness) if mix.name in LENGTHENED else mix for mix in mixes]
        texts = {mix.name: mix.texts for mix in mixes}
        harness.say("installing what is missing of the peers")
        line_up = LineUp(directory, card.path, texts, benchmark_device())
        with Turns(line_up.make_all(harness.systems, PEERS), harness) as turns:
            found = [(mix, turns.run(mix.name, harness.repeat)) for mix in mixes]
        limits = find_limits(harness)
        compared = [Comparison(mix, card, records, limits, SENTENCE_TRANSFORMERS) for mix, records in found]
    reasons = dict.fromkeys(reason for each in compared for reason in each.records.list_reasons())
    return Report(
        f"{card.name}, the first {card.max_tokens} tokens of a text, {harness.repeat} passes of each.",
        (*(each.to_table() for each in compared), tabulate(judge(compared))),
        (
            f"The mixes: {'; '.join(f'{mix.name}: {mix.description}' for mix in mixes)}.",
            "Median of all passes, smallest and largest in brackets. The peer is sentence-transformers with its "
            "defaults: fp32, batches of 32. Ratios are taken repetition by repetition.",
            "Tokens exclude padding and are counted once for all systems; padding is its share of the computed tokens. "
            "The share of the limit is relative to the rate of a matrix product in the system's precision: "
            f"{describe_rates(limits)}.",
            "infinity's torch engine receives padded batches, which are counted, but skips most of the padding "
            "internally.",
            "Memory is the peak resident memory of the encoding process; ours includes the worker, which tokenizes and "
            "commits. Cosines are to the peer's vectors, over all texts of the mix.",
            *reasons,
            *notes,
        ),
    )


def make_mixes(harness: Harness) -> tuple[list[Mix], list[str]]:
    """Return the mixes that can be made, and a sentence for each that cannot.

    `items` of the harness is the number of paragraphs; the other mixes are scaled alike.
    """
    mixes, notes = [], []
    share = 1.0 if harness.items is None else harness.items / MIXES[PARAGRAPHS][1]
    for name in harness.mixes or MIXES:
        if name not in MIXES:
            raise BenchmarkFailed(f"There is no mix {name!r}; there are {', '.join(MIXES)}.")
        try:
            mixes.append(make_mix(name, max(10, round(MIXES[name][1] * share)), prepare_texts))
        except (BenchmarkFailed, LookupError) as error:
            notes.append(f"The mix {name} is missing: {error}")
    if not mixes:
        raise BenchmarkFailed(" ".join(notes))
    return mixes, notes


def lengthen(mix: Mix, card: ModelCard, harness: Harness) -> Mix:
    """Repeat the texts of a mix until a pass of our engine takes about 30 s."""
    flop = ModelCost.of(card).count_flop(count_tokens(card, mix.texts))
    fastest = max(harness.machine.matrix_rates.values()) * GIGA * EXPECTED_SHARE
    num_copies = min(MOST_COPIES, max(1, math.ceil(PASS_SECONDS * fastest / flop)))
    if num_copies == 1:
        return mix
    texts = tuple(number_copies(mix.texts, num_copies))
    return replace(mix, texts=texts, description=f"{mix.description}, {num_copies} times over")


def find_limits(harness: Harness) -> dict[str, float]:
    """Return the matrix rate by precision: the faster of the rates before and after the passes.

    Another process on the machine may have slowed one of them.
    """
    harness.say("measuring again what the processor can do")
    again = measure_matrix_rates(benchmark_device())
    return {
        precision: max(rate, again[precision]) for precision, rate in harness.machine.matrix_rates.items()
    }


def find_precision(key: str, record: Record) -> str:
    """Return the precision that a system computed in: our engine's report, or the peer's configuration."""
    said = record.report.get("precision")
    if isinstance(said, Mapping):
        return str(said.get("value"))
    if key in OURS:
        return choose_precision(load_worker_settings().precision, benchmark_device()).value
    if key == OPENVINO and benchmark_device().has_bf16:
        return BF16  # OpenVINO's own default where the processor has the instructions
    return next((peer.precision for peer in (*PEERS, *GPU_PEERS) if peer.name == key), FP32)


def judge(compared: Sequence[Comparison]) -> list[Measure]:
    """Return the measures with targets, as far as they were measured."""
    by_mix = {each.mix.name: each for each in compared}
    measures: list[Measure] = []

    def add_ratio(mix: str, key: str, other: str | None, bound: float, words: str) -> None:
        each = by_mix.get(mix)
        ratio = each.records.speed(key, other) if each else None
        if each and other and ratio:
            measures.append(at_least(f"{mix}: {words.format(each.records[other].name)}", ratio, bound, RATIO))

    add_ratio(PARAGRAPHS, SERVICE, SENTENCE_TRANSFORMERS, 6.0, "end to end, to {}")
    for mix, bound in ((PARAGRAPHS, 1.8), (QUERIES, 1.8), (DOCUMENTS, 1.2)):
        fastest = by_mix[mix].find_fastest_peer() if mix in by_mix else None
        words = f"end to end, to the fastest peer with cosine ≥ {SAME_WORK_COSINE} ({{}})"
        add_ratio(mix, SERVICE, fastest, bound, words)
    for mix in LENGTHENED:
        add_ratio(mix, SERVICE, ENGINE, 0.96, "end to end, to {}")
    for mix, each in by_mix.items():
        share = each.limit_share(ENGINE)
        if mix == PARAGRAPHS and share is not None:
            measures.append(at_least(f"{mix}: our engine, of the matrix limit", share, 0.75, SHARE))
        record, peer = each.records.measured(SERVICE), each.records.measured(each.peer)
        if record is not None:
            waste = max(done.padding_waste for done in record.passes)
            measures.append(at_most(f"{mix}: padding, {record.name}", waste, 0.03, SHARE))
        if mix == DOCUMENTS and record and peer:
            saved = 1 - record.whole_peak_bytes / peer.whole_peak_bytes
            measures.append(
                at_least(f"{mix}: peak memory of the worker, below {peer.name}", saved, 0.6, SHARE)
            )
    measures += judge_short_job(by_mix)
    cosines = [found[0] for each in compared if (found := each.records.cosines(SERVICE, each.peer))]
    if cosines:
        name = "smallest cosine of a committed vector to fp32, all mixes"
        measures.append(at_least(name, min(cosines), SAME_WORK_COSINE, COSINE))
    return measures


def judge_short_job(by_mix: Mapping[str, Comparison]) -> list[Measure]:
    """Return measures that compare a job of some seconds with a long job of the same texts."""
    measures = []
    if {PARAGRAPHS, SHORT_JOB} <= by_mix.keys():
        for key in OURS:
            long, short = (by_mix[mix].records.measured(key) for mix in (PARAGRAPHS, SHORT_JOB))
            if long and short:
                rate = long.rate(by_mix[PARAGRAPHS].num_tokens).median
                shares = Spread.of([by_mix[SHORT_JOB].num_tokens / each / rate for each in short.seconds()])
                measures.append(at_least(f"a short job, to a long one, {short.name}", shares, 0.93, SHARE))
    return measures


def run_shapes(harness: Harness) -> Report:
    """Measure models of random weights, which are as fast as real ones."""
    device = find_device(harness.device)
    peers = GPU_PEERS if device.kind == CUDA else PEERS[:1]
    limits, texts = measure_matrix_rates(device), list_mixed()
    shapes = [SHAPES[name] for name in harness.shapes or GPU_SHAPES]
    compared = [measure_shape(harness, shape, device, peers, texts, limits) for shape in shapes]
    measures: list[Measure] = []
    for shape, each in zip(shapes, compared, strict=True):
        share = each.limit_share(ENGINE)
        if share is not None and shape.model_type in GPU_TARGETS:
            name = f"{shape.name}: our engine, of the matrix rate"
            measures.append(at_least(name, share, GPU_TARGETS[shape.model_type], SHARE))
        for key in each.records:
            ratio = each.records.speed(ENGINE, key) if key not in OURS else None
            if ratio:
                measures.append(
                    at_least(f"{shape.name}: our engine, to {each.records[key].name}", ratio, 2.0, RATIO)
                )
    return Report(
        f"random weights on {device.description or device.name}, {harness.repeat} passes of each.",
        (*(each.to_table() for each in compared), tabulate(measures)),
        (
            f"The matrix rate of the device: {describe_rates(limits)}. The share of the limit is relative to that of "
            "the system's precision; attention is counted completely, for decoders too.",
            f"Systems run one after the other, each alone. The peer, to which cosines refer, is {peers[0].title}.",
            "Memory is the device's, at its peak."
            if device.kind == CUDA
            else "Memory is resident, at its peak.",
            *(reason for each in compared for reason in each.records.list_reasons()),
        ),
    )


def read_device_bytes(sampler: DeviceSampler) -> int:
    """Return the memory in use of a GPU; 0 when the driver does not answer."""
    return sampler.sample().memory_used_bytes or 0


def measure_shape(
    harness: Harness,
    shape: Shape,
    device: Device,
    peers: Sequence[Peer],
    texts: Sequence[str],
    limits: Mapping[str, float],
) -> Comparison:
    """Measure one model shape in a directory of its own.

    A large model's files are deleted before the next one's are written.
    """
    with workplace(None) as directory:
        harness.say(f"writing random weights of the shape {shape.name}")
        card = write_random_model(shape, directory / "models" / shape.name)
        count = harness.items or math.ceil(
            shape.num_tokens / int(count_tokens(card, texts).sum()) * len(texts)
        )
        copies = number_copies(texts, math.ceil(count / len(texts)))
        mix = Mix(
            f"{shape.name}, mixed lengths",
            "queries, paragraphs and documents",
            tuple(take_evenly(copies, count)),
        )
        records = Records()
        for name, system in (
            LineUp(directory, card.path, {mix.name: mix.texts}, device)
            .make_all(harness.systems, peers)
            .items()
        ):
            sampler = DeviceSampler(device, lambda: None)
            read = PeakSampler(partial(read_device_bytes, sampler), MEMORY_PAUSE_SECONDS)
            with read if device.kind == CUDA else nullcontext(), Turns({name: system}, harness) as turns:
                records |= turns.run(mix.name, harness.repeat)
            if device.kind == CUDA:
                records[name].whole_peak_bytes = read.growth_bytes
        return Comparison(mix, card, records, limits, peers[0].name)
