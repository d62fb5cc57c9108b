"""Deliveries by the scheduler's duty, to a real receiver: once each where all goes well, and at least once always."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine

from scheduler.webhooks import MOST_OF_ONE, WebhookSender
from tests.database import ask, execute
from tests.protocol import claim_next, complete, make_items, submit
from tests.waiting import wait_for
from tests.webhook_receiver import Receiver, receiving
from tests.webhooks import (
    deliveries_of,
    delivery_of,
    look_at,
    make_deliveries_due,
    make_webhook,
)
from vectormill.db.session import make_engine
from vectormill.domain.errors import WebhookDisabled
from vectormill.jobs.deletion import discard_job
from vectormill.jobs.job import Job
from vectormill.settings import Settings
from vectormill.webhooks.webhook import Posting, Reply, make_secret
from vectormill.webhooks.webhooks import (
    change_webhook,
    claim_deliveries,
    prune_deliveries,
    record_reply,
    replay_delivery,
    replay_failed,
    rotate_secret,
)
from vectormill.work.work import Lease


@contextmanager
def sending(engine: Engine, **settings: object) -> Iterator[None]:
    """As a scheduler does, on a connection of its own."""
    own = make_engine(
        engine.url.render_as_string(hide_password=False), application_name="test", pool_size=1, max_overflow=0
    )
    given = {"webhook_private_targets": True, **settings}
    try:
        with WebhookSender(own, Settings(**given)):  # type: ignore[arg-type]
            yield
    finally:
        own.dispose()


def end_job(engine: Engine, prefix: str = "k") -> Job:
    job = submit(engine, make_items(1, prefix))
    complete(engine, claim_next(engine))
    return job


Claimed = tuple[Lease, Posting]


def claim(engine: Engine, lease_seconds: float = 60) -> list[Claimed]:
    return ask(engine, claim_deliveries, {}, owner="test", most=4, room=100, lease_seconds=lease_seconds)


def test_the_end_of_a_job_reaches_a_receiver_that_checks_its_signature(
    engine: Engine, receiver: Receiver
) -> None:
    webhook, secret = make_webhook(engine, receiver.url)
    with sending(engine):
        job = end_job(engine)
        wait_for(lambda: deliveries_of(engine, webhook, "delivered"))
        (message,) = receiver.messages
        event = message.verify(secret)
        assert (event["type"], event["data"]["id"]) == ("job.completed", str(job.id))
        (delivery,) = deliveries_of(engine, webhook)
        assert (delivery.num_attempts, delivery.status_code, delivery.error, delivery.due_at) == (
            1, 204, None, None,
        )  # fmt: skip
        assert look_at(engine, webhook).num_delivered == 1
        with engine.begin() as connection:  # it can be sent once more, with the same id
            replayed = replay_delivery(connection, webhook, delivery.id)
        assert (replayed.state, replayed.num_attempts) == ("pending", 0)
        wait_for(lambda: delivery_of(engine, replayed).state == "delivered")
    assert [each.id for each in receiver.messages] == [message.id] * 2


def test_a_failed_attempt_is_made_again_with_the_same_id_after_a_pause(
    engine: Engine, receiver: Receiver
) -> None:
    webhook, _ = make_webhook(engine, receiver.url)
    receiver.answer = lambda message: 500 if len(receiver.messages) == 1 else 200
    with sending(engine):
        end_job(engine)
        wait_for(lambda: [each for each in deliveries_of(engine, webhook) if each.error])
        (failed,) = deliveries_of(engine, webhook)
        assert (failed.state, failed.status_code, failed.error) == (
            "pending",
            500,
            "The receiver answered 500.",
        )
        assert failed.due_at is not None
        assert failed.attempted_at is not None
        assert 4 <= (failed.due_at - failed.attempted_at).total_seconds() < 60
        assert look_at(engine, webhook).failing_since is not None
        make_deliveries_due(engine)
        wait_for(lambda: deliveries_of(engine, webhook, "delivered"))
    first, second = receiver.messages
    assert (first.id, first.body) == (second.id, second.body)
    found = look_at(engine, webhook)
    assert (found.num_delivered, found.num_refused, found.num_failed, found.failing_since) == (1, 1, 0, None)


def test_a_slow_receiver_holds_up_nobody_else(engine: Engine, receiver: Receiver) -> None:
    is_over = threading.Event()
    with receiving() as slow:
        slow.answer = lambda message: 200 if is_over.wait(60) else 500
        of_slow, _ = make_webhook(engine, slow.url)
        other, _ = make_webhook(engine, receiver.url)
        for number in range(2 * MOST_OF_ONE):
            end_job(engine, f"k{number}-")
        with sending(engine, webhook_timeout_seconds=100):
            wait_for(lambda: len(deliveries_of(engine, other, "delivered")) == 2 * MOST_OF_ONE)
            assert deliveries_of(engine, of_slow, "delivered") == []
            assert len(slow.messages) <= MOST_OF_ONE
            is_over.set()
            wait_for(lambda: len(deliveries_of(engine, of_slow, "delivered")) == 2 * MOST_OF_ONE)


def test_a_private_address_is_refused_unless_the_setting_allows_it(
    engine: Engine, receiver: Receiver
) -> None:
    webhook, _ = make_webhook(engine, receiver.url.replace("127.0.0.1", "localhost"))
    end_job(engine)
    with sending(engine, webhook_private_targets=False):
        wait_for(lambda: [each for each in deliveries_of(engine, webhook) if each.error])
    assert receiver.messages == []
    assert "not a public address" in (deliveries_of(engine, webhook)[0].error or "")


def test_a_receiver_that_answers_410_is_told_no_more(engine: Engine, receiver: Receiver) -> None:
    webhook, _ = make_webhook(engine, receiver.url)
    receiver.answer = lambda message: 410
    end_job(engine, "a")
    end_job(engine, "b")
    with sending(engine):
        wait_for(lambda: not look_at(engine, webhook).is_enabled)
        wait_for(lambda: len(deliveries_of(engine, webhook, "failed")) == 2)
    assert look_at(engine, webhook).disabled_reason == (
        "The receiver answered 410 Gone: it wants no more messages."
    )
    end_job(engine, "c")
    assert len(deliveries_of(engine, webhook)) == 2
    with engine.begin() as connection, pytest.raises(WebhookDisabled, match="enable it first"):
        replay_delivery(connection, webhook, deliveries_of(engine, webhook)[0].id)


def test_days_without_a_success_disable_a_webhook_and_what_waited_can_be_replayed(engine: Engine) -> None:
    webhook, _ = make_webhook(engine)
    end_job(engine, "a")
    end_job(engine, "b")
    first, second = claim(engine)
    assert not ask(engine, record_reply, *first, Reply(500), 5)
    execute(engine, "UPDATE vectormill.webhooks SET failing_since = now() - interval '6 days'")
    assert ask(engine, record_reply, *second, Reply(None, "No answer."), 5)
    found = look_at(engine, webhook)
    assert (found.is_enabled, found.num_failed) == (False, 2)
    assert "for 5 days; the last error was: No answer." in (found.disabled_reason or "")
    failed = deliveries_of(engine, webhook, "failed")
    assert [("was disabled" in (each.error or "")) for each in failed] == [True, True]
    with engine.begin() as connection:
        enabled = change_webhook(connection, webhook, is_enabled=True)
        assert (enabled.disabled_reason, enabled.failing_since) == (None, None)
        assert replay_failed(connection, webhook, failed[1].created_at) == 1
    assert [each.message_id for _, each in claim(engine)] == [second[1].message_id]


def test_while_a_secret_is_rotated_both_are_believed_and_then_the_new_one_alone(engine: Engine) -> None:
    webhook, former = make_webhook(engine)
    newest = make_secret()
    ask(engine, rotate_secret, webhook, newest, 3600)
    end_job(engine)
    ((_, posting),) = claim(engine, lease_seconds=0)
    assert posting.secrets == [newest, former]
    execute(engine, "UPDATE vectormill.webhooks SET former_secret_until = now()")
    ((_, posting),) = claim(engine)
    assert posting.secrets == [newest]


def test_deliveries_are_pruned_when_they_ended_and_their_time_is_over(engine: Engine) -> None:
    webhook, _ = make_webhook(engine)
    for prefix in "abc":
        end_job(engine, prefix)
    for claimed in claim(engine)[:2]:
        ask(engine, record_reply, *claimed, Reply(200), None)
    assert ask(engine, prune_deliveries, 3600, 100) == 0
    assert ask(engine, prune_deliveries, -1, 1) == 1
    assert ask(engine, prune_deliveries, -1, 100) == 1
    assert ask(engine, prune_deliveries, -1, 100) == 0
    assert [each.state for each in deliveries_of(engine, webhook)] == ["pending"]


def test_an_event_outlives_its_job(engine: Engine) -> None:
    webhook, _ = make_webhook(engine)
    job = end_job(engine)
    ask(engine, discard_job, job.id)
    execute(engine, "DELETE FROM vectormill.jobs")
    assert len(claim(engine)) == 1
    assert look_at(engine, webhook).is_enabled


def test_a_failure_after_weeks_of_silence_is_the_first_again(engine: Engine) -> None:
    webhook, _ = make_webhook(engine)
    end_job(engine, "a")
    end_job(engine, "b")
    first, second = claim(engine)
    ask(engine, record_reply, *first, Reply(500), None)
    execute(
        engine,
        "UPDATE vectormill.webhooks SET failing_since = failing_since - interval '30 days', "
        "last_failed_at = last_failed_at - interval '29 days'",
    )
    assert not ask(engine, record_reply, *second, Reply(503), 5)
    found = look_at(engine, webhook)
    assert found.is_enabled
    assert [each.id for each in deliveries_of(engine, webhook, "pending")] == [second[0].key]
