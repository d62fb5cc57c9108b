"""The table of mutants and the core follow the code: `python -m tests.core` runs them, and takes minutes."""

import ast
from collections import defaultdict

from tests.core.mutants import MUTANTS, Mutant
from tests.core.records import ROOT
from tests.core.table import SEPARATOR, read_table
from tests.core.trials import mutate


def test_what_a_mutant_removes_is_there_once() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert not [name for name in names if SEPARATOR in name]
    complaints = {mutant.name: complaint for mutant in MUTANTS if (complaint := find_complaint(mutant))}
    assert complaints == {}


def find_complaint(mutant: Mutant) -> str | None:
    """Return why the mutant cannot be tried, if it cannot."""
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    try:
        changed = mutate(source, mutant)
    except LookupError as error:
        return str(error)
    if changed == source:
        return "it changes nothing"
    ast.parse(changed)
    return None


def test_each_mutant_has_a_killer_in_the_core() -> None:
    killed = {mutant for row in read_table().values() for mutant in row.mutants}
    assert killed == {mutant.name for mutant in MUTANTS}, (
        "run `.venv/bin/python -m tests.core record`, then `kill` and `choose`"
    )


def test_the_tests_of_the_core_are_there() -> None:
    names = defaultdict(set)
    for row in read_table().values():
        names[row.file].add(row.test.split("::", 1)[1].partition("[")[0])
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in names if (ROOT / file).exists()}
    missing = [
        f"{file}::{name}"
        for file in names
        for name in names[file]
        if f"def {name}(" not in sources.get(file, "")
    ]
    assert missing == [], (
        "run `.venv/bin/python -m tests.core record` on what took their place, then `choose`"
    )
