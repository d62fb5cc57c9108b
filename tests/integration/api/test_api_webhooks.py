"""Webhooks over HTTP, by the client and by the command line, on a real API and a real Postgres."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from api.door.scopes import OPERATIONS, find_scope
from scheduler.webhooks import WebhookSender
from tests.api_server import api_client, assert_problem, encode_waiting, many, submit
from tests.commands import Say, saying
from tests.commands import run as run_command
from tests.webhook_receiver import Receiver
from vectormill.client import Client
from vectormill.problems import ApiError
from vectormill.settings import Settings
from vectormill.webhooks.webhook import EVENTS, Reply
from vectormill.webhooks.webhooks import claim_deliveries, record_reply

URL = "https://example.com/hook"


@pytest.fixture
def client(http: httpx.Client) -> Iterator[Client]:
    with Client(str(http.base_url)) as client:
        yield client


@pytest.fixture
def run(http: httpx.Client, capsys: pytest.CaptureFixture[str]) -> Say:
    return saying(http, capsys, "webhooks")


def fail_all(engine: Engine) -> int:
    """What a receiver refused to the last; how many."""
    with engine.begin() as connection:
        claimed = claim_deliveries(connection, {}, owner="test", most=9, room=9, lease_seconds=60)
        for lease, posting in claimed:
            record_reply(connection, lease, posting, Reply(500), None)
    return len(claimed)


def test_a_webhook_is_made_looked_at_changed_and_deleted(http: httpx.Client, client: Client) -> None:
    made = client.create_webhook(URL, events=["job.failed", "job.completed"], description="Team search")
    assert made["secret"].startswith("whsec_")
    assert made["events"] == ["job.completed", "job.failed"]
    seen = {name: value for name, value in made.items() if name != "secret"}
    assert client.webhook(made["id"]) == seen
    assert client.create_webhook(URL)["events"] == list(EVENTS)
    assert [each["id"] for each in client.webhooks()] == [made["id"], made["id"] + 1]
    assert "secret" not in http.get("/v1/webhooks").text.replace("former_secret_until", "")
    changed = client.change_webhook(made["id"], url=URL + "/2", is_enabled=False)
    assert (changed["url"], changed["description"]) == (URL + "/2", "Team search")
    assert (changed["is_enabled"], changed["disabled_reason"]) == (False, "Disabled on request.")
    changed = client.change_webhook(made["id"], events=["run.held"], is_enabled=True)
    assert (changed["events"], changed["disabled_reason"]) == (["run.held"], None)
    client.delete_webhook(made["id"])
    with pytest.raises(ApiError, match="no webhook"):
        client.webhook(made["id"])


def test_what_cannot_be_sent_to_is_refused_when_it_is_made(http: httpx.Client) -> None:
    for body, words in (
        ({"url": "http://10.0.0.1/"}, "VECTORMILL_WEBHOOK_PRIVATE_TARGETS"),
        ({"url": "file:///etc/passwd"}, "must start with https://"),
        ({"url": URL, "events": ["job.done"]}, "Unknown event 'job.done'"),
        ({"url": URL, "description": "a\0b"}, "cannot be shown"),
    ):
        assert_problem(http.post("/v1/webhooks", json=body), 422, "invalid-option", words)
    assert http.get("/v1/webhooks").json()["data"] == []


def test_what_is_no_webhook_is_not_found(http: httpx.Client) -> None:
    for path in ("x", "7", "7/deliveries", str(2**70)):
        assert_problem(http.get(f"/v1/webhooks/{path}"), 404, "webhook-not-found")
    scopes = {
        find_scope(each.method, each.path.format(webhook_id=1, delivery_id=2))
        for each in OPERATIONS
        if "webhook" in each.path
    }
    assert scopes == {"webhooks"}


def test_deliveries_are_listed_by_page_and_state_and_replayed(
    engine: Engine, http: httpx.Client, client: Client
) -> None:
    webhook = client.create_webhook(URL)["id"]
    for number in range(3):
        submit(http, [{"key": str(number), "text": "a text"}])
        encode_waiting(engine)
    page = http.get(f"/v1/webhooks/{webhook}/deliveries", params={"limit": 2}).json()
    assert (len(page["data"]), page["next"] is None) == (2, False)
    found = list(client.webhook_deliveries(webhook))
    assert [each["state"] for each in found] == ["pending"] * 3
    assert found[0]["id"] > found[1]["id"]
    assert found[0]["payload"]["type"] == found[0]["type"] == "job.completed"
    assert fail_all(engine) == 3
    assert list(client.webhook_deliveries(webhook, state="delivered")) == []
    failed = list(client.webhook_deliveries(webhook, state="failed"))
    assert [(each["status_code"], each["error"]) for each in failed] == [
        (500, "The receiver answered 500.")
    ] * 3
    replayed = client.replay_delivery(webhook, failed[0]["id"])
    assert (replayed["state"], replayed["message_id"]) == ("pending", failed[0]["message_id"])
    assert client.replay_failed_deliveries(webhook, datetime.now(UTC)) == 0
    assert client.replay_failed_deliveries(webhook, datetime.now(UTC) - timedelta(hours=1)) == 2
    client.change_webhook(webhook, is_enabled=False)
    with pytest.raises(ApiError, match="enable it first"):
        client.replay_delivery(webhook, failed[0]["id"])
    with pytest.raises(ApiError, match="no delivery"):
        client.webhook_delivery(webhook, 10**6)


def test_the_metrics_tell_outcomes_and_how_long_the_oldest_event_waits(
    engine: Engine, http: httpx.Client, client: Client
) -> None:
    webhook = client.create_webhook(URL)["id"]
    submit(http, many(1))
    encode_waiting(engine)
    told = http.get("/metrics").text
    assert f'vectormill_webhook_enabled{{webhook="{webhook}"}} 1.0' in told
    (oldest,) = [
        line for line in told.splitlines() if line.startswith("vectormill_webhook_oldest_pending_seconds{")
    ]
    assert float(oldest.split()[-1]) > 0
    fail_all(engine)
    told = http.get("/metrics").text
    assert f'vectormill_webhook_deliveries_total{{outcome="failed",webhook="{webhook}"}} 1.0' in told
    assert f'vectormill_webhook_oldest_pending_seconds{{webhook="{webhook}"}} 0.0' in told


def test_the_command_line_makes_shows_rotates_and_deletes(
    engine: Engine, http: httpx.Client, run: Say
) -> None:
    made = run("create", URL, "--event", "job.completed", "--description", "Team search")
    assert "receives job.completed" in made
    secret = next(line for line in made.splitlines() if line.startswith("whsec_"))
    assert "Team search" in run("list")
    assert secret not in (shown := run("rotate", "1", "--grace-hours", "1"))
    assert "whsec_" in shown
    submit(http, many(1))
    encode_waiting(engine)
    fail_all(engine)
    assert "The receiver answered 500." in run("deliveries", "1", "--state", "failed")
    assert "1 deliveries will be sent again" in run("replay", "1", "--failed-since", "2026-01-01T00:00")
    assert "will be sent again" in run("replay", "1", "--delivery", "1")
    assert "Give either" in run("replay", "1", code=2)
    assert "expects an ISO 8601 moment" in run("replay", "1", "--failed-since", "yesterday", code=2)
    run("change", "1", "--disable")
    assert "disabled: Disabled on request." in run("list")
    run("delete", "1")
    assert len(run("list").splitlines()) == 1  # the titles


def test_a_test_event_says_what_the_receiver_answered(
    engine: Engine, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"webhook_private_targets": True}
    with api_client(engine, **settings) as http, WebhookSender(engine, Settings(**settings)):
        secret = http.post("/v1/webhooks", json={"url": receiver.url, "events": ["run.failed"]}).json()[
            "secret"
        ]
        for status, code, words in (
            (200, 0, "the receiver answered 200"),
            (404, 3, "The receiver answered 404."),
        ):
            receiver.answer = lambda message, status=status: status  # type: ignore[misc]
            assert run_command("webhooks", "test", "1", "--api-url", str(http.base_url)) == code
            assert words in capsys.readouterr().err
    assert receiver.messages[0].verify(secret)["type"] == "webhook.test"
