"""Report: what one benchmark found. Knows no machine and no date; they are put above it when it is written."""

from dataclasses import dataclass

from benchmarks.results.table import Table


@dataclass(frozen=True, slots=True)
class Report:
    """Tables, and sentences that say what was counted; `subject` is one line about what was measured."""

    name: str
    subject: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()

    def to_markdown(self, date: str, facts: str) -> str:
        """`facts` is a line about the machine."""
        parts = [f"{date}: {self.subject}", facts, *(table.to_markdown() for table in self.tables)]
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts)
