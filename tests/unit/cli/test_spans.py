"""A text with its spans marked, as `vectormill extract --show` prints it."""

from typing import Any

from vectormill.cli.spans import mark_spans, show_texts


def step(text: str, span: str, kind: str) -> dict[str, Any]:
    start = text.index(span)
    return {"type": kind, "span": span, "offset": [start, start + len(span)]}


def test_spans_are_marked_where_they_stand() -> None:
    text = "Ada Lovelace wrote to Charles Babbage."
    records = [[step(text, "Ada Lovelace", "person")], [step(text, "Charles Babbage", "person")]]
    assert mark_spans(text, records) == "[Ada Lovelace](person) wrote to [Charles Babbage](person)."


def test_a_span_within_another_and_one_of_two_types() -> None:
    text = "the mill of London"
    records = [
        [step(text, "mill of London", "organization"), step(text, "London", "place")],
        [step(text, "London", "seat")],
    ]
    assert mark_spans(text, records) == "the [mill of [London](place, seat)](organization)"


def test_neighbours_do_not_swallow_one_another() -> None:
    text = "ab"
    assert mark_spans(text, [[step(text, "a", "x")], [step(text, "b", "y")]]) == "[a](x)[b](y)"


def test_a_label_of_the_whole_text_stands_before_it() -> None:
    records = [[{"type": "sport", "span": "[CLASSIFY]", "offset": [0, 10]}]]
    assert mark_spans("a match", records) == "(sport) a match"


def test_texts_are_found_by_their_keys_and_only_so_many_are_shown() -> None:
    items = [{"key": f"k{number}", "text": f"t{number}"} for number in range(4)]
    rows: list[dict[str, Any]] = [{"key": key, "output": []} for key in ("k1", "k2", "k3")]  # k0 has failed
    assert show_texts(items, rows, 2) == ["k1: t1", "k2: t2"]
