"""Colours of a map: by value, by quantiles of numbers, and those that have none."""

from api.console.pictures.grouping import NOTHING, OTHERS, group_by_value


def test_the_commonest_values_have_colours_and_the_rest_share_one() -> None:
    values = [letter for number, letter in enumerate("abcdefghij") for _ in range(20 - number)]
    grouped = group_by_value([*values, None])
    assert grouped.labels == [*"abcdefg", OTHERS, NOTHING]
    assert grouped.numbers[0] == 0
    assert grouped.numbers[-2:] == [7, 8]


def test_a_few_values_are_all_there_is() -> None:
    grouped = group_by_value(["de", "en", "de"])
    assert (grouped.labels, grouped.numbers) == (["de", "en"], [0, 1, 0])


def test_many_numbers_are_cut_into_groups_of_like_size() -> None:
    grouped = group_by_value([str(number) for number in range(70)])
    assert grouped.labels[0] == "0 to 9.85714"
    assert len(grouped.labels) == 7
    assert [grouped.numbers.count(each) for each in range(7)] == [10] * 7


def test_numbers_of_which_some_are_none_keep_their_order() -> None:
    grouped = group_by_value([None, *(str(number) for number in range(20))])
    assert grouped.labels[-1] == NOTHING
    assert grouped.numbers[1:] == sorted(grouped.numbers[1:])


def test_a_value_that_is_no_finite_number_is_a_word() -> None:
    values = ["nan", *(str(number) for number in range(20))]
    assert OTHERS in group_by_value(values).labels
    assert group_by_value([]).labels == []
    assert group_by_value(["x" * 500]).labels == ["x" * 59 + "…"]
