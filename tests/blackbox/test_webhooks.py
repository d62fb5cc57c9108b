"""Webhooks: each end of a job is told once or more, signed, and after the receiver was away."""

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.blackbox.service import Service, find_free_port, wait_for


class Receiver:
    """A receiver that keeps what it was sent, and answers as it is told."""

    def __init__(self) -> None:
        self.messages: list[tuple[dict[str, str], bytes]] = []
        self.status = 204
        self.port = find_free_port()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.messages.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def find(self, job: str) -> list[tuple[dict[str, str], bytes]]:
        return [(headers, body) for headers, body in self.messages if job.encode() in body]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


def test_the_end_of_a_job_is_told_with_a_signature(service: Service, receiver: Receiver) -> None:
    made = service.ask("POST", "/v1/webhooks", 201, json={"url": f"http://127.0.0.1:{receiver.port}/hook"})
    try:
        job = service.submit({"a": "told"})
        headers, body = wait_for(lambda: receiver.find(job), "the receiver is told")[0]
        assert json.loads(body)["type"] == "job.completed"
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        secret = base64.b64decode(made["secret"].removeprefix("whsec_"))
        expected = base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()
        assert f"v1,{expected}" in headers["webhook-signature"].split()
    finally:
        service.remove(f"/v1/webhooks/{made['id']}")


def test_a_receiver_that_was_away_is_told_again_and_a_replay_keeps_the_id(
    service: Service, receiver: Receiver
) -> None:
    made = service.ask("POST", "/v1/webhooks", 201, json={"url": f"http://127.0.0.1:{receiver.port}/hook"})
    try:
        receiver.status = 503
        job = service.submit({"a": "told again"})
        wait_for(lambda: receiver.find(job), "the first attempt")
        receiver.status = 204
        wait_for(lambda: len(receiver.find(job)) > 1, "the second attempt")
        path = f"/v1/webhooks/{made['id']}/deliveries"
        (delivery,) = wait_for(
            lambda: [each for each in service.ask("GET", path)["data"] if each["state"] == "delivered"],
            "it is kept as delivered",
        )
        num_sent = len(receiver.find(job))
        service.ask("POST", f"{path}/{delivery['id']}/replay", 202)
        wait_for(lambda: len(receiver.find(job)) > num_sent, "it is sent once more")
        assert len({headers["webhook-id"] for headers, _ in receiver.find(job)}) == 1
    finally:
        service.remove(f"/v1/webhooks/{made['id']}")


def test_an_event_survives_the_loss_of_the_scheduler(service: Service, receiver: Receiver) -> None:
    made = service.ask("POST", "/v1/webhooks", 201, json={"url": f"http://127.0.0.1:{receiver.port}/hook"})
    try:
        with service.frozen("scheduler"):
            jobs = [service.submit({"a": f"survives {n}"}) for n in range(3)]
            victim = service.processes("scheduler")[0]
            victim.kill()
        for job in jobs:
            service.wait(job)
            wait_for(lambda job=job: receiver.find(job), "the end is told by the next scheduler")  # type: ignore[misc]
    finally:
        service.remove(f"/v1/webhooks/{made['id']}")
