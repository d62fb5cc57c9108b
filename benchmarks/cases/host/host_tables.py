"""The tables of this benchmark, from what was measured. Measures nothing."""

from collections.abc import Mapping
from typing import Final

from benchmarks.cases.host.measured import OTHERS, PROCESSES, Measured, compare_rates
from benchmarks.results.table import Measure, Table
from benchmarks.results.writing import write_number, write_ratio, write_share
from vectormill.domain.jobs.bottleneck import STAGES

NOW: Final = "now"
BEFORE: Final = "before"
ENGINE_TARGET: Final = 0.7
FASTER_TARGET: Final = 2.5
BUSY_TARGET: Final = 0.9
BESIDE_TARGET: Final = 15.0
# Promised for the shortest texts, whose model takes least.
JUDGED_TOKENS: Final = 16

# By the number of tokens, and by the name of the checkout.
Results = Mapping[int, Mapping[str, Measured]]


def tabulate_rates(results: Results, num_cores: int) -> Table:
    header = (
        "texts of", "end to end", "engine alone", "bare tokenizer", "engine to tokenizer", "cores busy",
        "bytes in the pipe", "bytes read", "blocks",
    )  # fmt: skip
    rows = []
    for num_tokens, name, found in _list(results):
        blocks = found.num_blocks()
        rows.append(
            (
                _name_row(num_tokens, name, results),
                found.job_rate().describe(write_number),
                found.engine_rate().describe(write_number),
                found.tokenizer_rate().describe(write_number),
                found.engine_share().describe(write_share),
                write_share(found.busy_share(num_cores).median),
                write_number(found.runner_bytes()),
                write_number(found.read_bytes()),
                "" if blocks is None else write_number(blocks),
            )
        )
    return Table(header, tuple(rows))


def tabulate_micros(results: Results) -> Table:
    """Processor time of each process, of the bare and the own tokenizer, and of the engine alone."""
    names = (*PROCESSES, OTHERS)
    rows = tuple(
        (
            _name_row(num_tokens, name, results),
            *(write_number(found.process_micros(each)) for each in names),
            write_number(found.host_micros()),
            write_number(found.tokenizer_micros()),
            write_number(found.own_tokenizer_micros()),
            write_number(found.engine_micros()),
            found.beside_tokenizer_micros().describe(write_number),
        )
        for num_tokens, name, found in _list(results)
    )
    header = (
        "µs a text", *names, "together", "bare tokenizer", "own tokenizer", "engine alone",
        "worker beside its tokenizer",
    )  # fmt: skip
    return Table(header, rows)


def tabulate_stages(results: Results) -> Table:
    rows = tuple(
        (_name_row(num_tokens, name, results), *(write_number(found.stage_micros(stage)) for stage in STAGES))
        for num_tokens, name, found in _list(results)
    )
    return Table(("µs a text, by stage", *STAGES), rows)


def judge(results: Results, num_cores: int) -> list[Measure]:
    """What the shortest texts were to reach."""
    if JUDGED_TOKENS not in results:
        return []
    found = results[JUDGED_TOKENS][NOW]
    share, busy, beside = found.engine_share(), found.busy_share(num_cores), found.beside_tokenizer_micros()
    measures = [
        Measure(
            "engine alone, to the bare tokenizer",
            share.describe(write_share),
            f"≥ {ENGINE_TARGET:.0%}",
            share.median >= ENGINE_TARGET,
        ),
        Measure(
            "cores busy, end to end",
            busy.describe(write_share),
            f"≥ {BUSY_TARGET:.0%}",
            busy.median >= BUSY_TARGET,
        ),
        Measure(
            "processor time of the worker beside its tokenizer",
            f"{beside.describe(write_number)} µs a text",
            f"≤ {BESIDE_TARGET:g} µs",
            # A worker that takes less than its own tokenizer was measured wrongly, and meets nothing.
            beside.low > 0 and beside.median <= BESIDE_TARGET,
        ),
    ]
    for name, before in results[JUDGED_TOKENS].items():
        if name != NOW:
            faster = compare_rates(_rates(found), _rates(before))
            measures.insert(
                0,
                Measure(
                    f"end to end, to {name}",
                    faster.describe(write_ratio),
                    f"≥ {FASTER_TARGET:g}×",
                    faster.median >= FASTER_TARGET,
                ),
            )
    return measures


def _rates(found: Measured) -> list[float]:
    return [job.num_texts / job.seconds for job in found.jobs]


def _list(results: Results) -> list[tuple[int, str, Measured]]:
    return [
        (num_tokens, name, found) for num_tokens, named in results.items() for name, found in named.items()
    ]


def _name_row(num_tokens: int, name: str, results: Results) -> str:
    tokens = f"{num_tokens} tokens"
    return tokens if len(results[num_tokens]) == 1 else f"{tokens}, {name}"
