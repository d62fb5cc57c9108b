"""Tables of the docs say what the tables of the code say."""

import re
from collections.abc import Callable

import pytest

from tests.architecture.doc_tables import DOC_TABLES, find_block
from tests.architecture.sources import DOCS, ROOT
from vectormill.models.model_card import POOLING_NAMES


@pytest.mark.parametrize(("page", "name", "make"), DOC_TABLES)
def test_a_table_of_the_docs_is_the_one_of_the_code(page: str, name: str, make: Callable[[], str]) -> None:
    blocks = find_block(name).findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks == [make()], "python -m tests.architecture.doc_tables"


def test_every_way_of_pooling_can_be_found() -> None:
    (row,) = re.findall(
        r"^\| `pooling` \| (.*) \|$", (DOCS / "CONFIGURATION.md").read_text("utf-8"), re.MULTILINE
    )
    assert set(re.findall(r"`(\w+)`", row)) == set(POOLING_NAMES)
