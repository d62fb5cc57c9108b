"""TaskDemo: what the demo of a task submits, by which model where none is named, and what it shows of the results.

Knows no service; vectormill.cli.demos.running carries one out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vectormill.client import Client
    from vectormill.files.ndjson import ItemJson

Json = Mapping[str, Any]
# The results of a job by key.
Results = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Weights:
    """A model by its name, None for the service's own; `path` where it is not registered.

    `reason` says why this one, in a few words; `told` what weights these are, in a sentence.
    """

    model: str | None
    reason: str
    told: str
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A table under a title."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Findings:
    """Tables for people, and figures for machines."""

    tables: Sequence[Listing]
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskDemo:
    """One task's row.

    `choose_weights` gets a directory that lives as long as the demo. `list_items` gets how many are wanted.
    `options` are the job's, `is_sound` says of a result that it is one, and `find` what there is to show of those.
    """

    task: str
    noun: str
    num_items: int
    choose_weights: Callable[[Path], Weights]
    list_items: Callable[[int], Sequence["ItemJson"]]
    read_results: Callable[["Client", str], Iterator[Json]]
    is_sound: Callable[[Json], bool]
    find: Callable[[Sequence["ItemJson"], Results], Findings]
    options: Mapping[str, Any] = field(default_factory=dict)
