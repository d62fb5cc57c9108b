"""PairComparison: what systems did with the same pairs, as a table and as measures beside their targets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.results.comparison import NOT_MEASURED
from benchmarks.results.table import Measure, Table
from benchmarks.results.writing import write_mebibytes, write_number, write_ratio, write_share
from benchmarks.systems.line_up import ENGINE, SERVICE
from benchmarks.systems.pairs.naive import choose_timed
from benchmarks.systems.pairs.pair_line_up import INT8_ENGINE, NAIVE
from benchmarks.systems.turns import Record

COLUMNS: Final = (
    "pairs/s", "tokens/s", "to the naive way", "to CrossEncoder", "padding", "peak memory", "largest difference",
)  # fmt: skip
NAIVE_TARGET: Final = 3.0
PEER_TARGET: Final = 1.3
MEMORY_TARGET: Final = 0.6


@dataclass(frozen=True, slots=True)
class PairComparison:
    """`peer` is the key of CrossEncoder.predict at its best options, None where it could not be had."""

    shape: str
    num_pairs: int
    num_tokens: int
    records: Mapping[str, Record]
    peer: str | None

    def measured(self, key: str | None) -> Record | None:
        record = self.records.get(key) if key is not None else None
        return record if record is not None and record.passes and record.failure is None else None

    def find_difference(self, key: str) -> float | None:
        """The largest of a probability to the naive reference's, over the pairs that it has judged."""
        record, naive = self.measured(key), self.measured(NAIVE)
        if record is None or naive is None or record.vectors is None or naive.vectors is None:
            return None
        ours = record.vectors
        if len(ours) != len(naive.vectors):
            ours = ours[choose_timed(self.num_pairs, len(naive.vectors))]
        return float(np.abs(ours - naive.vectors).max())

    def to_table(self) -> Table:
        title = f"{self.shape}: {self.num_pairs:,} pairs, {self.num_tokens:,} tokens"
        return Table((title, *COLUMNS), tuple(self._row(key) for key in self.records))

    def reasons(self) -> dict[str, str]:
        """Why systems were not measured, by name."""
        return {record.name: record.failure for record in self.records.values() if record.failure is not None}

    def judge(self) -> Iterator[Measure]:
        """Ours beside the targets; memory is that of all processes of a worker."""
        naive, peer = self.measured(NAIVE), self.measured(self.peer)
        for key in (SERVICE, ENGINE):
            ours = self.measured(key)
            for other, target in ((naive, NAIVE_TARGET), (peer, PEER_TARGET)):
                if ours and other:
                    ratio = ours.speed_against(other)
                    yield Measure(
                        f"{self.shape}: {ours.name}, to {other.name}",
                        ratio.describe(write_ratio),
                        f"≥ {target:g}×",
                        ratio.median >= target,
                    )
        for key in (SERVICE, INT8_ENGINE.name):
            ours = self.measured(key)
            if ours and naive:
                saved = 1 - ours.whole_peak_bytes / naive.whole_peak_bytes
                yield Measure(
                    f"{self.shape}: peak memory, {ours.name}, below {naive.name}",
                    write_share(saved),
                    f"≥ {MEMORY_TARGET:.0%}",
                    saved >= MEMORY_TARGET,
                )

    def _row(self, key: str) -> tuple[str, ...]:
        record = self.measured(key)
        if record is None:
            return (self.records[key].name, NOT_MEASURED, *[""] * (len(COLUMNS) - 1))
        naive, peer, difference = self.measured(NAIVE), self.measured(self.peer), self.find_difference(key)
        return (
            record.name,
            record.rate(self.num_pairs).describe(write_number),
            write_number(record.rate(self.num_tokens).median),
            record.speed_against(naive).describe(write_ratio) if naive else "",
            record.speed_against(peer).describe(write_ratio) if peer else "",
            write_share(record.passes[-1].padding_waste),
            write_mebibytes(record.whole_peak_bytes),
            "" if difference is None else f"{difference:.1e}",
        )
