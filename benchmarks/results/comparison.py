"""Comparison: what several systems did with one mix, as a table. Knows nothing of targets or of how it was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.probes.closeness import Closeness
from benchmarks.results.table import Table
from benchmarks.results.writing import (
    write_cosine,
    write_mebibytes,
    write_number,
    write_ratio,
    write_share,
)
from benchmarks.systems.turns import Record

GIGA = 1e9
NOT_MEASURED = "not measured"
COLUMNS = (
    "texts/s", "tokens/s", "to the peer", "padding", "share of limit", "peak memory", "min. cosine", "mean cosine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """`flop` is what the mix takes; `peer` is the key of the record that all are compared with, in speed and cosine.

    `precisions` and `limits` are by key, and by precision in GFLOP/s.
    """

    mix: str
    description: str
    num_texts: int
    num_tokens: int
    flop: float
    peer: str
    records: Mapping[str, Record]
    precisions: Mapping[str, str]
    limits: Mapping[str, float]

    def title(self) -> str:
        return f"{self.mix}: {self.num_texts:,} texts, {self.num_tokens:,} tokens"

    def peer_name(self) -> str:
        return self.records[self.peer].name if self.peer in self.records else self.peer

    def measured(self, key: str) -> Record | None:
        """A record with passes, if there is one."""
        record = self.records.get(key)
        return record if record is not None and record.passes and record.failure is None else None

    def limit_share(self, key: str) -> float | None:
        """Median share of the matrix rate in the system's precision."""
        record = self.measured(key)
        if record is None:
            return None
        return record.rate(self.flop).median / (self.limit_of(key) * GIGA)

    def limit_of(self, key: str) -> float:
        """GFLOP/s in the system's precision; the slowest there is for one that was not measured, as for int8."""
        return self.limits.get(self.precisions.get(key, ""), min(self.limits.values()))

    def closeness(self, key: str) -> Closeness | None:
        """To the peer's vectors."""
        record, peer = self.measured(key), self.measured(self.peer)
        if record is None or peer is None or record.vectors is None or peer.vectors is None:
            return None
        if record.vectors.shape != peer.vectors.shape:
            return None
        return Closeness.between(record.vectors, peer.vectors)

    def to_table(self) -> Table:
        """One row per system; one that was not measured says so, and its reason stands in `reasons`."""
        return Table((self.title(), *COLUMNS), tuple(self._row(key) for key in self.records))

    def reasons(self) -> dict[str, str]:
        """Why systems were not measured, by name."""
        return {record.name: record.failure for record in self.records.values() if record.failure is not None}

    def _row(self, key: str) -> tuple[str, ...]:
        record = self.measured(key)
        if record is None:
            return (self.records[key].name, NOT_MEASURED, *[""] * (len(COLUMNS) - 1))
        peer, share, closeness = self.measured(self.peer), self.limit_share(key), self.closeness(key)
        return (
            record.name,
            record.rate(self.num_texts).describe(write_number),
            write_number(record.rate(self.num_tokens).median),
            record.speed_against(peer).describe(write_ratio) if peer else "",
            write_share(record.passes[-1].padding_waste),
            write_share(share) if share is not None else "",
            write_mebibytes(record.whole_peak_bytes),
            write_cosine(closeness.smallest) if closeness else "",
            write_cosine(closeness.mean) if closeness else "",
        )
