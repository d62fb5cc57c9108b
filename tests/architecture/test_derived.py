"""What is made from tables of the code is as it would be made now, and nobody forgot what is a person's to write."""

from tests.architecture.derived import EMPTY_CELL, PAGES, read, rewrite
from tools.client import ROOT, make_files


def test_every_page_is_as_it_would_be_written_now() -> None:
    differing = [page for page in PAGES if rewrite(page, read(page)) != read(page)]
    assert differing == [], "run python -m tests.architecture.derived"


def test_every_made_file_of_the_client_is_as_it_would_be_made_now() -> None:
    differing = [file for file, text in make_files().items() if (ROOT / file).read_text() != text]
    assert differing == [], "run python -m tools.client"


def test_nothing_that_is_for_a_person_to_say_is_left_out() -> None:
    empty = {page: EMPTY_CELL.findall(read(page)) for page in PAGES if page.endswith(".md")}
    assert {page: rows for page, rows in empty.items() if rows} == {}, "fill in the last cell of each row"
