"""The table of mutants follows the code: `make mutants` runs it, and takes minutes."""

import ast

from tests.mutants.__main__ import ROOT, mutate
from tests.mutants.table import MUTANTS, Mutant


def test_what_a_mutant_removes_is_there_once_and_so_are_the_tests_that_must_fail() -> None:
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
    for test in mutant.tests:
        file, _, name = test.split()[0].partition("::")
        name, _, _ = name.partition("[")
        if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8"):
            return f"there is no test {name} in {file}"
    return None
