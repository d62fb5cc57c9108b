import base64

import pytest

from vectormill.domain.errors import InvalidOption
from vectormill.webhooks.webhook import (
    EVENTS,
    RETRY_SECONDS,
    Reply,
    check_events,
    make_secret,
    pause_after,
)

REFUSED = Reply(500)


def test_no_event_means_all_and_an_unknown_one_is_refused_with_those_that_exist() -> None:
    assert check_events([]) == EVENTS
    assert check_events(["run.failed", "job.failed", "job.failed"]) == ("job.failed", "run.failed")
    with pytest.raises(InvalidOption, match=r"'job.done'; expected one of: job\.completed, "):
        check_events(["job.done"])


def test_pauses_grow_to_a_day_and_end_after_three() -> None:
    pauses = [pause_after(attempt, REFUSED, 0.5) for attempt in range(1, 12)]
    assert pauses == [*RETRY_SECONDS, None, None]
    assert 3 * 86_400 < sum(RETRY_SECONDS) < 4 * 86_400


def test_what_failed_together_comes_again_apart() -> None:
    assert pause_after(2, REFUSED, 0.0) == pytest.approx(270)
    assert pause_after(2, REFUSED, 1.0) == pytest.approx(330)


def test_a_receiver_lengthens_a_pause_up_to_a_day_and_never_shortens_it() -> None:
    assert pause_after(1, Reply(503, retry_after=60), 0.5) == 60
    assert pause_after(1, Reply(503, retry_after=1), 0.5) == 5
    assert pause_after(1, Reply(503, retry_after=1e9), 0.5) == 86_400


def test_after_410_nothing_is_sent_again() -> None:
    assert pause_after(1, Reply(410), 0.5) is None


def test_a_secret_is_as_long_as_the_specification_wants_and_never_the_same() -> None:
    secrets = {make_secret() for _ in range(10)}
    assert len(secrets) == 10
    assert {len(base64.b64decode(secret.removeprefix("whsec_"))) for secret in secrets} == {32}
