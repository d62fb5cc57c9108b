"""A request for a run that is repeated across an upgrade is compared by the bytes of the release before."""

import msgspec

from api.routes.runs import write_compared
from vectormill.runs.operations import RunRequest


def test_a_run_is_compared_by_the_same_bytes_as_in_earlier_releases() -> None:
    body = {
        "kind": "check",
        "options": {
            "model": "m",
            "priority": 3,
            "least_recall": 0.9,
            "sample": 10,
            "full": True,
            "dimensions": 64,
        },
    }
    assert write_compared("docs", msgspec.convert(body, RunRequest)) == (
        b'docs\n{"kind":"check","options":{"dimensions":64,"full":true,"sample":10,"priority":3,"least_recall":0.9,'
        b'"model":"m"}}'
    )
