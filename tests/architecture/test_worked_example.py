"""docs/TASKS.md quotes code that is there, and that passes the contract of tasks."""

import re
from typing import Final

from tests.architecture.sources import DOCS, ROOT

PAGE: Final = (DOCS / "TASKS.md").read_text(encoding="utf-8")
BLOCKS: Final = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FOLDER: Final = ROOT / "tests" / "tagging"
KINDS: Final = ROOT / "tests" / "integration" / "tasks" / "kinds.py"
CODE: Final = [path.read_text(encoding="utf-8") for path in (*sorted(FOLDER.glob("*.py")), KINDS)]
PATHS: Final = re.findall(r"`((?:vectormill|worker|tests|api)/[\w/.]+)`", PAGE)


def test_what_the_page_quotes_stands_in_the_code() -> None:
    there = [" ".join(code.split()) for code in CODE]
    absent = [block for block in BLOCKS if not any(" ".join(block.split()) in code for code in there)]
    assert absent == [], "quote in docs/TASKS.md what stands in tests/tagging"


def test_the_page_quotes_something_of_each_step_and_names_places_that_exist() -> None:
    assert len(BLOCKS) >= 7
    assert PATHS
    assert [path for path in PATHS if not (ROOT / path).exists()] == []
