"""docs/TASKS.md quotes code that is there, and that passes the contract of tasks."""

import re
from typing import Final

import pytest

from tests.architecture.sources import DOCS, ROOT

PAGE: Final = (DOCS / "TASKS.md").read_text(encoding="utf-8")
BLOCKS: Final = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FOLDER: Final = ROOT / "tests" / "tagging"
KINDS: Final = ROOT / "tests" / "integration" / "tasks" / "kinds.py"
CODE: Final = [path.read_text(encoding="utf-8") for path in (*sorted(FOLDER.glob("*.py")), KINDS)]
PATHS: Final = re.findall(r"`((?:vectormill|worker|tests|api)/[\w/.]+)`", PAGE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[0][:40])
def test_what_the_page_quotes_stands_in_the_code(block: str) -> None:
    assert any(" ".join(block.split()) in " ".join(code.split()) for code in CODE)


def test_the_page_quotes_something_of_each_step_and_names_places_that_exist() -> None:
    assert len(BLOCKS) >= 7
    assert PATHS
    assert [path for path in PATHS if not (ROOT / path).exists()] == []
