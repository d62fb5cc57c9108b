"""Samples in a worker's report: what is written is read, and whatever an older worker writes is no error."""

import json
from typing import Any

import pytest

from vectormill.workers.samples import MOST_SAMPLES, Sample, read_samples, write_samples


def test_what_is_written_is_read_to_the_digits_that_a_chart_shows() -> None:
    samples = [
        Sample(25.0, 123_456.0, 4000, 97),
        Sample(15.0, 0.0, None, None),
        Sample(5.0, 7.4, 4001, 0),
    ]
    report = {"recent": json.loads(json.dumps(write_samples(samples)))}
    assert read_samples(report) == [
        Sample(25.0, 123_000, 4000, 97),
        Sample(15.0, 0, None, None),
        Sample(5.0, 7, 4001, 0),
    ]


@pytest.mark.parametrize(
    "report",
    [
        {},  # of a release without samples
        {"recent": None},
        {"recent": write_samples([])},  # in its first ten seconds
        {"recent": "12 13"},
        {"recent": {"tokens_per_second": [1, 2]}},
        {"recent": {**write_samples([Sample(1, 2, 3, 4)]), "busy_percent": []}},  # not as long as the others
    ],
)
def test_a_report_without_samples_that_can_be_read_has_none(report: dict[str, Any]) -> None:
    assert read_samples(report) == []


def test_samples_of_the_largest_machine_take_less_than_a_kilobyte_and_a_half() -> None:
    # Compressed, and with what reports had before, that is two rows of TOAST as before: decision 0038.
    most = [Sample(600.0 - 10 * number, 98_765_432.1, 192_000, 100) for number in range(MOST_SAMPLES)]
    assert len(json.dumps(write_samples(most))) < 1536
