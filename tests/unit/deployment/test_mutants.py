"""The table of mutants follows the code: `make mutants` runs it, and takes minutes."""

import ast

import pytest

from tests.mutants.__main__ import ROOT, mutate
from tests.mutants.table import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_a_mutant_removes_is_there_once_and_so_are_the_tests_that_must_fail(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutate(source, mutant) != source
    ast.parse(mutate(source, mutant))
    for test in mutant.tests:
        file, _, name = test.split()[0].partition("::")
        name, _, _ = name.partition("[")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), "there is no such test"
