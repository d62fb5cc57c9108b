from pathlib import Path

import pytest

from benchmarks.results.readme import README, closing_marker, opening_marker, replace_section, write_section
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.results.table import Measure, Table, judge, tabulate
from benchmarks.results.writing import write_cosine, write_mebibytes, write_number, write_ratio, write_share
from benchmarks.suite import BENCHMARKS

SECTION = f"before\n{opening_marker('a')}\n\nold\n\n{closing_marker('a')}\nafter\n"


@pytest.mark.parametrize(
    ("values", "expected", "reason"),
    [
        ([3.0, 1.0, 2.0], Spread(2.0, 1.0, 3.0), "order does not matter"),
        ([4.0], Spread(4.0, 4.0, 4.0), "one measurement has no width"),
        ([1.0, 2.0, 9.0, 3.0], Spread(2.5, 1.0, 9.0), "an even count has its median between two"),
    ],
)
def test_a_spread_is_the_median_between_the_extremes(
    values: list[float], expected: Spread, reason: str
) -> None:
    assert Spread.of(values) == expected, reason


def test_no_measurement_has_no_spread() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_a_spread_is_written_with_its_extremes_only_where_they_can_be_seen() -> None:
    assert Spread(2.0, 1.0, 3.0).describe(write_ratio) == "2.00× (1.00× to 3.00×)"
    assert Spread(2.0, 2.0, 2.001).describe(write_ratio) == "2.00×"


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.0512, "0.0512"), (9.8765, "9.88"), (48.123, "48.1"), (1234.5, "1,234"), (-250.0, "-250"), (0.0, "0")],
)
def test_a_number_is_written_with_the_digits_that_a_measurement_has(value: float, written: str) -> None:
    assert write_number(value) == written


def test_cosines_close_to_one_do_not_read_alike() -> None:
    assert write_cosine(0.99995) != write_cosine(0.9999)


def test_a_small_share_does_not_read_as_nothing() -> None:
    assert (write_share(0.4127), write_share(0.0007)) == ("41.3%", "0.07%")


def test_memory_is_written_in_binary_units_that_say_so() -> None:
    assert write_mebibytes(3 << 30) == "3,072 MiB"


def test_a_table_in_markdown_has_its_numbers_to_the_right_and_no_broken_cells() -> None:
    table = Table(("name", "value"), (("a|b", "1"),))
    assert table.to_markdown() == "| name | value |\n| :--- | ---: |\n| a\\|b | 1 |"


def test_a_row_with_another_number_of_cells_is_refused() -> None:
    with pytest.raises(AssertionError, match="columns"):
        Table(("name", "value"), (("a",),))


def test_a_measure_stands_beside_its_target_and_says_whether_it_was_reached() -> None:
    table = tabulate(
        [
            Measure("speed", "4×", "≥ 3×", True),
            Measure("size", "9 MB", "< 5 MB", False),
            Measure("more", "1"),
        ]
    )
    assert table.rows == (
        ("speed", "4×", "≥ 3×, met"),
        ("size", "9 MB", "< 5 MB, **missed**"),
        ("more", "1", ""),
    )
    assert judge("≥ 3×", True) == table.rows[0][2]


def test_a_report_begins_with_its_date_and_the_machine() -> None:
    report = Report("a", "ten texts.", (Table(("x",), (("1",),)),), ("A note.",))
    assert report.to_markdown("2026-01-31", "Two cores.") == (
        "2026-01-31: ten texts.\n\nTwo cores.\n\n| x |\n| :--- |\n| 1 |\n\n- A note."
    )


def test_a_section_is_replaced_whole_and_what_stands_around_it_stays() -> None:
    once = replace_section(SECTION, "a", "new\n")
    assert once == SECTION.replace("old", "new")
    assert replace_section(once, "a", "new") == once


@pytest.mark.parametrize("text", ["", opening_marker("a"), closing_marker("a") + opening_marker("a")])
def test_a_page_without_a_place_for_a_section_is_not_changed(text: str, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="no place for a"):
        write_section("a", "new", page)
    assert page.read_text() == text


def test_the_readme_has_a_place_for_every_benchmark() -> None:
    text = README.read_text(encoding="utf-8")
    for name in BENCHMARKS:
        assert f"\n\nx\n\n{closing_marker(name)}" in replace_section(text, name, "x")
