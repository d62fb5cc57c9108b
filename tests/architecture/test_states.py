"""Lists of states in statements are those that the domain names: a new state is decided on wherever it matters.

Statements spell their lists, so that they read as they run. Each must be one of the lists that are made from the rows
of states in the domain; a row more, and every list that should have it or not fails here with its place.
"""

import re
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Final

import pytest

from tests.architecture.sources import PACKAGES, find_sources, read_source
from vectormill.domain import collection, run
from vectormill.domain.jobs import chunk, job
from vectormill.domain.requests import request_batch, request_file

LIST: Final = re.compile(r"(?:\b(\w+)\.)?state (?:NOT )?IN \(('[^)]*)\)")
TABLE: Final = re.compile(r"\bvectormill\.(jobs|chunks|runs|generations|request_batches|request_files)\b")
# What statements call the rows of these tables; without a name it is the table that was named last.
NOUN_OF_NAME: Final = {
    "job": "jobs", "jobs": "jobs", "twin": "jobs", "original": "jobs",
    "chunk": "chunks", "chunks": "chunks",
    "run": "runs", "runs": "runs", "other": "runs",
    "generation": "generations", "generations": "generations",
    "batch": "request_batches", "request_batches": "request_batches",
}  # fmt: skip

Lists = Mapping[str, frozenset[frozenset[str]]]


def lists_of(module: ModuleType) -> frozenset[frozenset[str]]:
    """Every …_STATES of a module of the domain."""
    return frozenset(frozenset(value) for name, value in vars(module).items() if name.endswith("_STATES"))


KNOWN: Final[Lists] = {
    "jobs": lists_of(job),
    "chunks": lists_of(chunk),
    "runs": lists_of(run),
    "generations": lists_of(collection),
    "request_batches": lists_of(request_batch),
    "request_files": lists_of(request_file),
}


@cache
def find_lists() -> list[tuple[str, str, frozenset[str]]]:
    """Place, table and states of every list in the statements of the packages."""
    found = []
    for path in find_sources(*PACKAGES):
        source = read_source(path)
        for match in LIST.finditer(source):
            before = TABLE.findall(source, 0, match.start())
            noun = NOUN_OF_NAME[match[1]] if match[1] else before[-1]
            line = source.count("\n", 0, match.start()) + 1
            found.append((f"{path}:{line}", noun, frozenset(re.findall(r"'(\w+)'", match[2]))))
    return found


def find_unknown(known: Lists) -> list[str]:
    return [place for place, noun, states in find_lists() if states not in known[noun]]


def test_every_list_of_states_in_a_statement_is_one_that_the_domain_names() -> None:
    assert len(find_lists()) > 40
    assert find_unknown(KNOWN) == [], "name the list in the domain beside the rows of states, or correct it"


@pytest.mark.parametrize(
    ("noun", "like", "at_least"),
    [
        ("jobs", job.PAUSED, 10),
        ("jobs", job.RUNNING, 15),
        ("runs", run.HELD, 5),
        ("chunks", chunk.PENDING, 3),
    ],
)
def test_a_state_more_is_missed_at_every_list_that_should_have_it(
    noun: str, like: str, at_least: int
) -> None:
    grown = frozenset(states | {"frozen"} if like in states else states for states in KNOWN[noun])
    assert len(find_unknown({**KNOWN, noun: grown})) >= at_least
