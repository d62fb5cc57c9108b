"""What is made from tables of the code is as it would be made now, and nobody forgot what is a person's to write."""

import pytest

from tests.architecture.derived import EMPTY_CELL, PAGES, fill, keep_rows, read, rewrite, table
from tools.client import ROOT, make_files

PAGE = """# Page

| name | default | meaning |
| --- | --- | --- |
| `a` | 1 | first |
| `gone` | 2 | no more |
| `c` | 3 | third |

| other |
| --- |
| `x` | stays |
"""


def test_every_page_is_as_it_would_be_written_now() -> None:
    differing = [page for page in PAGES if rewrite(page, read(page)) != read(page)]
    assert differing == [], "run python -m tests.architecture.derived"


def test_every_made_file_of_the_client_is_as_it_would_be_made_now() -> None:
    differing = [file for file, text in make_files().items() if (ROOT / file).read_text() != text]
    assert differing == [], "run python -m tools.client"


def test_nothing_that_is_for_a_person_to_say_is_left_out() -> None:
    empty = {page: EMPTY_CELL.findall(read(page)) for page in PAGES if page.endswith(".md")}
    assert {page: rows for page, rows in empty.items() if rows} == {}, "fill in the last cell of each row"


def test_rows_are_made_for_what_is_new_and_removed_for_what_is_gone() -> None:
    written = keep_rows({"a": ["9"], "b": ["2"], "c": ["3"]}, section="# Page")(PAGE)
    assert written.split("\n")[4:8] == ["| `a` | 9 | first |", "| `b` | 2 |  |", "| `c` | 3 | third |", ""]
    assert written.endswith(PAGE.partition("third |")[2])
    assert len(EMPTY_CELL.findall(written)) == 1


def test_a_page_whose_rows_or_marks_are_gone_is_said_to_have_none() -> None:
    with pytest.raises(AssertionError, match="no row"):
        keep_rows({"z": []}, like="<{}>")(PAGE)
    with pytest.raises(AssertionError, match="no mark"):
        fill("names", "x")(PAGE)


def test_what_is_between_marks_is_made_in_pages_and_in_code() -> None:
    assert fill("some", "b, c")("say <!-- some -->a<!-- end -->.") == "say <!-- some -->b, c<!-- end -->."
    code = "x = 1\n# <some>\n{}# <end>\ny = 2\n"
    assert fill("some", "z = 4\n")(code.format("z = 3\n")) == code.format("z = 4\n")
    assert table([("a", "b"), ("1", "2")]) == "\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"
