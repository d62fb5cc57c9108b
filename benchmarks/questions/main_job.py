"""main_job: every docstring of the standard library, HTTP to committed rows, beside sentence-transformers."""

from benchmarks.harness import BenchmarkFailed, Harness
from benchmarks.machine import benchmark_device, describe_rates
from benchmarks.models import find_packaged
from benchmarks.ours import ENGINE, SERVICE, LineUp
from benchmarks.peers import PEERS, SENTENCE_TRANSFORMERS
from benchmarks.questions.engine import Comparison, find_limits, find_precision, lengthen
from benchmarks.tables import (
    COSINE,
    MEBIBYTES,
    NUMBER,
    RATIO,
    SECONDS,
    SHARE,
    Report,
    Spread,
    at_least,
    tabulate,
    told,
)  # fmt: skip
from benchmarks.texts import Mix, list_docstrings
from benchmarks.turns import Turns
from vectormill.cli.stack import workplace

PEER = SENTENCE_TRANSFORMERS


def run(harness: Harness) -> Report:
    card = find_packaged()
    texts = tuple(item["text"] for item in list_docstrings(harness.items))
    mix = Mix("docstrings", "every docstring of the standard library", texts)
    mix = mix if harness.items else lengthen(mix, card, harness)
    with workplace(None) as directory:
        line_up = LineUp(directory, card.path, {mix.name: mix.texts}, benchmark_device())
        with Turns(line_up.make_all((SERVICE, ENGINE, PEER), PEERS), harness) as turns:
            records = turns.run(mix.name, harness.repeat)
        if turns.failures:
            raise BenchmarkFailed(" ".join(turns.failures.values()))
        limits = find_limits(harness)
    compared = Comparison(mix, card, records, limits, PEER)
    committed, engine = (records.cosines(key, PEER) or (0.0, 0.0) for key in (SERVICE, ENGINE))
    ratio = records[SERVICE].speed_against(records[PEER])
    measures = (
        at_least("HTTP to committed rows, to the peer", ratio, 3.0, RATIO),
        at_least("smallest cosine of a committed vector to the peer's in fp32", committed[0], 0.999, COSINE),
        told("mean cosine of the committed vectors", committed[1], COSINE),
        told("smallest cosine of our engine's vectors", engine[0], COSINE),
        told("end to end, to the engine alone", records[SERVICE].speed_against(records[ENGINE]), RATIO),
    )
    table = records.tabulate(
        "system",
        {
            "time": lambda _, record: SECONDS(Spread.of(record.seconds())),
            "texts/s": lambda _, record: NUMBER(record.rate(compared.num_texts).median),
            "tokens/s": lambda _, record: NUMBER(record.rate(compared.num_tokens).median),
            "to the peer": lambda _, record: RATIO(record.speed_against(records[PEER])),
            "padding": lambda _, record: SHARE(record.passes[-1].padding_waste),
            "share of limit": lambda key, record: (
                f"{SHARE(compared.limit_share(key) or 0.0)} of {find_precision(key, record)}"
            ),
            "model's process": lambda _, record: MEBIBYTES(record.model_peak_bytes),
            "and its worker": lambda _, record: MEBIBYTES(record.whole_peak_bytes),
        },
    )
    return Report(
        f"{mix.description}: {compared.num_texts:,} texts, {compared.num_tokens:,} tokens, {card.name}, "
        f"{harness.repeat} passes of each.",
        (table, tabulate(measures)),
        (
            "Median of all passes, smallest and largest in brackets. Ratios are taken repetition by repetition.",
            "Tokens include special tokens but no padding; padding is its share of the computed tokens.",
            f"The corpus takes {compared.flop / 1e12:.2f} TFLOP: 2 per token and multiplied parameter, "
            "and 4 × layers × length × hidden size for attention. The share of the limit is this number, divided by "
            f"the seconds and by the rate of a matrix product: {describe_rates(limits)}.",
            "Memory is the peak resident memory of the process that holds the model, and of that process together with "
            "the worker, which tokenizes and commits. Postgres and the API are not included.",
        ),
    )
