"""docs/CHANGES.md names places that exist, and counts them right."""

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.changes import list_commits, make_table
from tests.architecture.derived import PAGES, read
from tests.architecture.sources import DOCS, ROOT

PAGE: Final = (DOCS / "CHANGES.md").read_text(encoding="utf-8")
ROW: Final = re.compile(r"^\| (\d+) \| [^|]+ \| (\d+) \| ([\d–]+) \| (\d+) \| ([\d–]+) \|$", re.MULTILINE)
SECTION: Final = re.compile(r"^## (\d+)\. (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
PLACE: Final = re.compile(r"^\d+\. `([^`]+)` `([^`]+)`: (.*)$", re.MULTILINE)
MARK: Final = re.compile(r"(?:<!--|# <) ?([a-z ]+?)(?: -->|>)")
COMPARED_BY: Final = re.compile(r"`(test_\w+\.py)`")

ROWS: Final = {row[0]: row[1:] for row in ROW.findall(PAGE)}
SECTIONS: Final = {number: PLACE.findall(text) for number, _, text in SECTION.findall(PAGE)}
PLACES: Final = [(path, symbol) for places in SECTIONS.values() for path, symbol, _ in places]


def count_repeats(number: str) -> int:
    return sum("*Again" in said for _, _, said in SECTIONS[number])


def test_a_change_has_as_many_places_and_repeats_as_the_table_says() -> None:
    said = {number: (int(ROWS[number][1]), int(ROWS[number][3])) for number in SECTIONS}
    assert {number: (len(SECTIONS[number]), count_repeats(number)) for number in SECTIONS} == said


def test_what_is_made_is_counted_as_nobodys_place() -> None:
    made = {(page, name) for page in PAGES for name in MARK.findall(read(page))}
    assert made
    assert not [place for place in PLACES if (place[0], place[1].strip("<!-> #")) in made]


def test_a_place_is_where_it_is_said_to_be() -> None:
    assert PLACES
    gone = [
        f"{path}: {symbol}"
        for path, symbol in PLACES
        if symbol not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert gone == [], "docs/CHANGES.md names places that are no more; correct them there"


def test_whatever_is_said_to_compare_a_repeat_is_a_test() -> None:
    tests = {Path(path).name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(COMPARED_BY.findall(PAGE)) <= tests | {"test_changes.py"}


def test_the_table_of_commits_is_what_the_script_prints() -> None:
    commits = list_commits()
    assert commits
    known = subprocess.run(
        ["git", "cat-file", "-e", commits[0]], cwd=ROOT, stderr=subprocess.DEVNULL
    ).returncode
    if known != 0:
        pytest.skip(f"this copy of the project has no history with the commit {commits[0]}")
    assert make_table(commits) in PAGE, "run python -m tests.architecture.changes"
