"""What is answered of the numbers of an item's labels, and records as they lie beside a chunk."""

import numpy as np

from vectormill.vectors.records import pack_records, read_records
from vectormill.vectors.scores import choose_scores, describe_scores

NUMBERS = np.array([[0.25, 0.75], [0.9, 0.1]], dtype=np.float32)


def test_of_two_labels_the_second_one_says_that_something_holds() -> None:
    first, second = describe_scores(["a", "b"], NUMBERS, ("no", "yes"))
    assert first == {"key": "a", "score": 0.75, "label": "yes", "probabilities": {"no": 0.25, "yes": 0.75}}
    assert (second["label"], np.float32(second["score"])) == ("no", np.float32(0.1))


def test_of_more_labels_the_best_one_is_told() -> None:
    (only,) = describe_scores(["a"], np.array([[0.2, 0.5, 0.3]], dtype=np.float32), ("x", "y", "z"))
    assert (only["score"], only["label"]) == (0.5, "y")


def test_one_number_has_no_label() -> None:
    for labels in ((), ("LABEL_0",)):
        (only,) = describe_scores(["a"], np.array([[-3.5]], dtype=np.float32), labels)
        assert only == {"key": "a", "score": -3.5, "label": None, "probabilities": None}


def test_numbers_are_written_with_as_many_digits_as_tell_them_apart() -> None:
    numbers = np.random.default_rng(1).random((200, 2), dtype=np.float32)
    written = describe_scores([str(row) for row in range(200)], numbers, ("no", "yes"))
    assert np.array_equal(np.array([row["score"] for row in written], dtype=np.float32), numbers[:, 1])


def test_no_rows_have_no_scores() -> None:
    scores, best = choose_scores(np.zeros((0, 3), dtype=np.float32), ("x", "y", "z"))
    assert (len(scores), len(best)) == (0, 0)


def test_records_are_read_as_they_were_packed() -> None:
    records = [b"[]", None, b'[{"a":"\xe4\xba\xba"}]', b""]
    assert read_records(pack_records(records), 4) == records
    for nothing in (None, b""):
        assert read_records(nothing, 2) == [None, None]
