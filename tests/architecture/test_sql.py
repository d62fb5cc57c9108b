"""What the statements of the project have in common, read from their text."""

import re
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT, find_sources

STATEMENT = re.compile(r'"""(.*?)"""', re.DOTALL)
NUMBER = r"(?::[a-z_]+|(?<![\w.])\d+)"
COMPUTED = re.compile(rf"{NUMBER} *[-+*/] *:[a-z_]+|:[a-z_]+ *[-+*/] *{NUMBER}")


@pytest.mark.parametrize("path", find_sources(*PACKAGES), ids=str)
def test_a_number_that_sql_computes_with_has_a_type(path: Path) -> None:
    # The driver sends the smallest type that holds the value: 256 * 1,536 overflowed a smallint.
    statements = STATEMENT.findall((ROOT / path).read_text(encoding="utf-8"))
    untyped = [found for statement in statements for found in COMPUTED.findall(statement)]
    assert not untyped, "compute it in Python, or write CAST(:name AS bigint)"
