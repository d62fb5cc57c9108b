"""Commands for webhooks, which report ends of jobs and runs. The API requires a key of the scope webhooks."""

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import typer

from vectormill.cli.command import Client, Names, command
from vectormill.cli.exits import UNAVAILABLE, CommandFailed
from vectormill.cli.printing import listing, print_json, tell
from vectormill.domain.errors import InvalidOption

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill webhooks create https://example.com/hook --event job.completed --event job.failed",
    help="Send signed messages to a URL when jobs and runs end (Standard Webhooks).",
)

# How long `webhooks test` waits for the first delivery attempt, which is the only one of a test.
TEST_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 0.3

Webhook = Mapping[str, Any]
Delivery = Mapping[str, Any]


def show_secret(webhook: Webhook) -> None:
    tell(f"Webhook {webhook['id']} receives {', '.join(webhook['events'])}. Its secret:")
    typer.echo(webhook["secret"])


@command(
    app,
    "vectormill webhooks create https://example.com/hook",
    "vectormill webhooks create https://example.com/hook --event job.failed --event run.failed --event run.held",
    view=show_secret,
)
def create(client: Client, url: str, *, event: Names | None = None, description: str = "") -> Webhook:
    """Create a webhook and print its secret, with which the receiver checks signatures. It is shown only this once.

    Args:
        url (URL): The http or https address that receives the messages.
        event (TYPE): An event to send, such as job.completed or run.failed.  [default: all]
        description (TEXT): A note, such as the owner.
    """
    return client.create_webhook(url, events=event or (), description=description)


def describe_state(webhook: Webhook) -> str:
    if not webhook["is_enabled"]:
        return f"disabled: {webhook['disabled_reason']}"
    failing = webhook["failing_since"]
    return "enabled" if failing is None else f"failing since {failing[:16]}"


@command(
    app,
    "vectormill webhooks list",
    name="list",
    view=listing(
        "id",
        "url",
        ("events", lambda webhook: " ".join(webhook["events"])),
        ("state", describe_state),
        ("delivered", "num_delivered"),
        ("given up", "num_failed"),
        "description",
    ),
)
def list_all(client: Client) -> Iterator[Webhook]:
    """List the webhooks with their addresses and the results of their deliveries."""
    return client.webhooks()


@command(app, "vectormill webhooks change 1 --url https://example.com/new-hook")
def change(
    client: Client,
    webhook: int,
    *,
    url: str | None = None,
    event: Names | None = None,
    description: str | None = None,
    enable: bool | None = None,
) -> str:
    """Change a webhook; options that are not given stay.

    Args:
        url (URL): The new address.
        event (TYPE): Send only these events.
        description (TEXT):
        enable (--enable/--disable): Enable or disable it. Enabling clears its failures.
    """
    client.change_webhook(webhook, url=url, events=event, description=description, is_enabled=enable)
    return f"Changed webhook {webhook}."


@command(
    app,
    "vectormill webhooks deliveries 1",
    "vectormill webhooks deliveries 1 --state failed --json",
    view=listing(
        "id",
        ("event", "type"),
        ("of", lambda delivery: delivery["payload"]["data"].get("id")),
        "state",
        ("attempts", "num_attempts"),
        ("status", "status_code"),
        ("next attempt", lambda delivery: (delivery["next_attempt_at"] or "")[:19]),
        "error",
    ),
)
def deliveries(
    client: Client,
    webhook: int,
    *,
    state: Literal["pending", "delivered", "failed"] | None = None,
    limit: int = 20,
) -> Iterator[Delivery]:
    """List a webhook's deliveries and their results, newest first.

    Args:
        state: List only deliveries in this state.  [default: all]
    """
    return itertools.islice(client.webhook_deliveries(webhook, state=state), limit)


@command(
    app,
    "vectormill webhooks replay 1 --delivery 42",
    "vectormill webhooks replay 1 --failed-since 2026-11-23T08:00",
)
def replay(
    client: Client, webhook: int, *, delivery: int | None = None, failed_since: str | None = None
) -> str:
    """Send deliveries again, with the same `webhook-id`.

    Args:
        delivery (ID): Send this delivery again, whatever its state.
        failed_since (MOMENT): Send all failed deliveries of events since this moment: ISO 8601, in UTC unless it names
            another zone.
    """
    if delivery is not None and failed_since is None:
        client.replay_delivery(webhook, delivery)
        return f"Delivery {delivery} will be sent again."
    if failed_since is not None and delivery is None:
        from vectormill.moments import parse_moment

        num_replayed = client.replay_failed_deliveries(webhook, parse_moment("--failed-since", failed_since))
        return f"{num_replayed:,} deliveries will be sent again."
    raise InvalidOption("Give either --delivery ID or --failed-since MOMENT.")


@command(app, "vectormill webhooks test 1", name="test")
def send_test(client: Client, webhook: int, *, json: bool = False) -> str:
    """Send an event `webhook.test`, and print the receiver's answer. Needs a running scheduler."""
    delivery = client.test_webhook(webhook)
    until = time.monotonic() + TEST_SECONDS
    while (
        is_waiting := delivery["state"] == "pending"
        and delivery["error"] is None
        and delivery["status_code"] is None
    ) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)  # the API has no stream of deliveries
        delivery = client.webhook_delivery(webhook, delivery["id"])
    if json:
        print_json(delivery)
    if is_waiting:
        raise CommandFailed("The test was not sent yet. Is `vectormill scheduler` running?", UNAVAILABLE)
    if delivery["state"] != "delivered":
        raise CommandFailed(f"It was not delivered. {delivery['error']}", UNAVAILABLE)
    return f"Delivered: the receiver answered {delivery['status_code']}."


@command(app, "vectormill webhooks rotate 1 --grace-hours 24")
def rotate(client: Client, webhook: int, *, grace_hours: float = 24.0) -> None:
    """Create a new secret and print it. It is shown only this once.

    Args:
        grace_hours (N, 0 to 720): Also sign with the old secret for this many hours.
    """
    rotated = client.rotate_webhook_secret(webhook, grace_seconds=grace_hours * 3600)
    tell(f"Webhook {webhook} has a new secret, shown only this once:")
    typer.echo(rotated["secret"])


@command(app, "vectormill webhooks delete 1")
def delete(client: Client, webhook: int) -> str:
    """Delete a webhook with its deliveries."""
    client.delete_webhook(webhook)
    return f"Deleted webhook {webhook}."
