"""Collections for a page: a line each, and what of a source may be shown."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vectormill.collections.collection import VECTORS, find_kind
from vectormill.collections.descriptions import CollectionRow
from vectormill.collections.standings import Standing
from vectormill.sources.source import hide_queries

# Text before an @ in an address may be a password, wherever it was written.
_CREDENTIALS: Final = re.compile(r"(://)[^/\s@]+@")


@dataclass(frozen=True, slots=True)
class CollectionLine:
    """A collection in a list. `lag_seconds` is the age of the oldest change that nobody has encoded yet."""

    row: CollectionRow
    standing: Standing

    @property
    def kind(self) -> str:
        return find_kind(self.row.spec)

    @property
    def index(self) -> str:
        """`none` reads every row at each search; of scores and records there is no such index."""
        return self.standing.index_state or ("none" if self.kind == VECTORS else "–")

    @property
    def lag_seconds(self) -> float | None:
        oldest = self.standing.oldest_change_at
        return None if oldest is None else max(0.0, (self.row.now - oldest).total_seconds())

    @property
    def doing(self) -> str:
        """`reindex: encoding`, or empty."""
        standing = self.standing
        if standing.run_kind is None:
            return ""
        is_working = standing.run_state == "running" and standing.run_phase
        return f"{standing.run_kind}: {standing.run_phase if is_working else standing.run_state}"


def hide_credentials(options: Mapping[str, Any]) -> dict[str, str]:
    """Return a source's options as text. What opens a database is named and not kept; a URL may still carry a
    password.
    """
    return {name: hide_queries(_CREDENTIALS.sub(r"\1…@", str(value))) for name, value in options.items()}
