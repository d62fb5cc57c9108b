"""Webhooks: each end of a job is told once or more, signed, and after the receiver was away."""

from collections.abc import Iterator

import pytest

from tests.blackbox.service import Service, wait_for
from tests.webhook_receiver import Message, Receiver, receiving


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def told(receiver: Receiver, job: str) -> list[Message]:
    return [message for message in receiver.messages if job.encode() in message.body]


def test_the_end_of_a_job_is_told_with_a_signature(service: Service, receiver: Receiver) -> None:
    made = service.ask("POST", "/v1/webhooks", 201, json={"url": receiver.url})
    try:
        job = service.submit({"a": "told"})
        message = wait_for(lambda: told(receiver, job), "the receiver is told")[0]
        assert message.verify(made["secret"])["type"] == "job.completed"
    finally:
        service.remove(f"/v1/webhooks/{made['id']}")


def test_a_receiver_that_was_away_is_told_again_and_a_replay_keeps_the_id(
    service: Service, receiver: Receiver
) -> None:
    made = service.ask("POST", "/v1/webhooks", 201, json={"url": receiver.url})
    try:
        receiver.answer = lambda message: 503
        job = service.submit({"a": "told again"})
        wait_for(lambda: told(receiver, job), "the first attempt")
        receiver.answer = lambda message: 204
        wait_for(lambda: len(told(receiver, job)) > 1, "the second attempt")
        path = f"/v1/webhooks/{made['id']}/deliveries"
        (delivery,) = wait_for(
            lambda: [each for each in service.ask("GET", path)["data"] if each["state"] == "delivered"],
            "it is kept as delivered",
        )
        num_sent = len(told(receiver, job))
        service.ask("POST", f"{path}/{delivery['id']}/replay", 202)
        wait_for(lambda: len(told(receiver, job)) > num_sent, "it is sent once more")
        assert len({message.id for message in told(receiver, job)}) == 1
    finally:
        service.remove(f"/v1/webhooks/{made['id']}")


def test_an_event_survives_the_loss_of_the_scheduler(service: Service, receiver: Receiver) -> None:
    made = service.ask("POST", "/v1/webhooks", 201, json={"url": receiver.url})
    try:
        with service.frozen("scheduler"):
            jobs = [service.submit({"a": f"survives {n}"}) for n in range(3)]
            victim = service.processes("scheduler")[0]
            victim.kill()
        for job in jobs:
            service.wait(job)
            wait_for(lambda job=job: told(receiver, job), "the end is told by the next scheduler")  # type: ignore[misc]
    finally:
        service.remove(f"/v1/webhooks/{made['id']}")
