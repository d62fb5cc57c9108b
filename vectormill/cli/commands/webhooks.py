"""Webhooks: where the ends of jobs and runs are told. Each command speaks to one API, which wants an admin key."""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from vectormill.cli.options import Json, NewestFirst, with_client

if TYPE_CHECKING:
    from datetime import datetime

    from vectormill.client import Client

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill webhooks create https://example.com/hook --event job.completed --event job.failed",
    help="Send signed messages to a URL when jobs and runs end (Standard Webhooks).",
)

Id = Annotated[int, typer.Argument(metavar="ID", help="The webhook's id, as shown by `webhooks list`.")]
Events = Annotated[
    list[str] | None,
    typer.Option(
        "--event",
        metavar="TYPE",
        help="An event to send, such as job.completed or run.failed. May be repeated.",
        show_default="all",
    ),
]

# A test is over when its first attempt is: the API asks nobody else.
_TEST_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.3


@app.command(
    epilog="Examples: vectormill webhooks create https://example.com/hook\n\n"
    "vectormill webhooks create https://example.com/hook --event job.failed --event run.failed --event run.held"
)
@with_client
def create(
    client: "Client",
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The http or https address that receives the messages.")
    ],
    event: Events = None,
    description: Annotated[
        str, typer.Option("--description", metavar="TEXT", help="A note, such as the owner.")
    ] = "",
    json: Json = False,
) -> None:
    """Create a webhook and print its secret, with which the receiver checks signatures. It is shown only this once."""
    from vectormill.cli.views.listing import print_json

    made = client.create_webhook(url, events=event or (), description=description)
    if json:
        print_json(made)
        return
    typer.echo(f"Webhook {made['id']} receives {', '.join(made['events'])}. Its secret:", err=True)
    typer.echo(made["secret"])


@app.command("list", epilog="Example: vectormill webhooks list")
@with_client
def list_all(client: "Client", json: Json = False) -> None:
    """List the webhooks with their addresses and the results of their deliveries."""
    from vectormill.cli.views.listing import print_listing

    found = list(client.webhooks())
    columns = ("id", "url", "events", "state", "delivered", "given up", "description")

    def describe(webhook: Mapping[str, Any]) -> tuple[Any, ...]:
        failing = webhook["failing_since"]
        enabled = "enabled" if failing is None else f"failing since {failing[:16]}"
        return (
            webhook["id"],
            webhook["url"],
            " ".join(webhook["events"]),
            enabled if webhook["is_enabled"] else f"disabled: {webhook['disabled_reason']}",
            webhook["num_delivered"],
            webhook["num_failed"],
            webhook["description"],
        )

    print_listing(found, columns, describe, is_json=json)


@app.command(epilog="Example: vectormill webhooks change 1 --url https://example.com/new-hook")
@with_client
def change(
    client: "Client",
    webhook: Id,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="The new address.")] = None,
    event: Annotated[
        list[str] | None,
        typer.Option(
            "--event", metavar="TYPE", help="Send only these events. May be repeated.", show_default=False
        ),
    ] = None,
    description: Annotated[str | None, typer.Option("--description", metavar="TEXT")] = None,
    enable: Annotated[
        bool | None,
        typer.Option("--enable/--disable", help="Enable or disable it. Enabling clears its failures."),
    ] = None,
) -> None:
    """Change a webhook; options that are not given stay."""
    client.change_webhook(webhook, url=url, events=event, description=description, is_enabled=enable)
    typer.echo(f"Changed webhook {webhook}.", err=True)


@app.command(
    epilog="Examples: vectormill webhooks deliveries 1\n\nvectormill webhooks deliveries 1 --state failed --json"
)
@with_client
def deliveries(
    client: "Client",
    webhook: Id,
    state: Annotated[
        Literal["pending", "delivered", "failed"] | None,
        typer.Option("--state", help="List only deliveries in this state.", show_default="all"),
    ] = None,
    limit: NewestFirst = 20,
    json: Json = False,
) -> None:
    """List a webhook's deliveries and their results, newest first."""
    from vectormill.cli.views.listing import print_listing

    found = list(itertools.islice(client.webhook_deliveries(webhook, state=state), limit))
    columns = ("id", "event", "of", "state", "attempts", "status", "next attempt", "error")

    def describe(delivery: Mapping[str, Any]) -> tuple[Any, ...]:
        return (
            delivery["id"],
            delivery["type"],
            delivery["payload"]["data"].get("id"),
            delivery["state"],
            delivery["num_attempts"],
            delivery["status_code"],
            (delivery["next_attempt_at"] or "")[:19],
            delivery["error"],
        )

    print_listing(found, columns, describe, is_json=json)


@app.command(
    epilog="Examples: vectormill webhooks replay 1 --delivery 42\n\n"
    "vectormill webhooks replay 1 --failed-since 2026-11-23T08:00"
)
@with_client
def replay(
    client: "Client",
    webhook: Id,
    delivery: Annotated[
        int | None,
        typer.Option(
            "--delivery",
            metavar="ID",
            help="Send this delivery again, whatever its state.",
            show_default=False,
        ),
    ] = None,
    failed_since: Annotated[
        str | None,
        typer.Option(
            "--failed-since",
            metavar="MOMENT",
            help="Send all failed deliveries of events since this moment: ISO 8601, in UTC unless it names "
            "another zone.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Send deliveries again, with the same `webhook-id`."""
    from vectormill.domain.errors import InvalidOption

    if (delivery is None) == (failed_since is None):
        raise InvalidOption("Give either --delivery ID or --failed-since MOMENT.")
    since = None if failed_since is None else _parse_moment(failed_since)
    if delivery is not None:
        client.replay_delivery(webhook, delivery)
        typer.echo(f"Delivery {delivery} will be sent again.", err=True)
    elif since is not None:
        num_replayed = client.replay_failed_deliveries(webhook, since)
        typer.echo(f"{num_replayed:,} deliveries will be sent again.", err=True)


@app.command("test", epilog="Example: vectormill webhooks test 1")
@with_client
def send_test(client: "Client", webhook: Id, json: Json = False) -> None:
    """Send an event `webhook.test`, and print the receiver's answer. Needs a running scheduler."""
    import time

    from vectormill.cli.exits import UNAVAILABLE, CommandFailed
    from vectormill.cli.views.listing import print_json

    delivery = client.test_webhook(webhook)
    until = time.monotonic() + _TEST_SECONDS
    while _has_no_answer(delivery) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)  # the API has no stream of deliveries
        delivery = client.webhook_delivery(webhook, delivery["id"])
    if json:
        print_json(delivery)
    if _has_no_answer(delivery):
        raise CommandFailed("The test was not sent yet. Is `vectormill scheduler` running?", UNAVAILABLE)
    if delivery["state"] != "delivered":
        raise CommandFailed(f"It was not delivered. {delivery['error']}", UNAVAILABLE)
    typer.echo(f"Delivered: the receiver answered {delivery['status_code']}.", err=True)


@app.command(epilog="Example: vectormill webhooks rotate 1 --grace-hours 24")
@with_client
def rotate(
    client: "Client",
    webhook: Id,
    grace_hours: Annotated[
        float,
        typer.Option(
            "--grace-hours",
            metavar="N",
            min=0,
            max=720,
            help="Also sign with the old secret for so many hours.",
        ),
    ] = 24.0,
) -> None:
    """Create a new secret and print it. It is shown only this once."""
    rotated = client.rotate_webhook_secret(webhook, grace_seconds=grace_hours * 3600)
    typer.echo(f"Webhook {webhook} has a new secret, shown only this once:", err=True)
    typer.echo(rotated["secret"])


@app.command(epilog="Example: vectormill webhooks delete 1")
@with_client
def delete(client: "Client", webhook: Id) -> None:
    """Delete a webhook with its deliveries."""
    client.delete_webhook(webhook)
    typer.echo(f"Deleted webhook {webhook}.", err=True)


def _parse_moment(written: str) -> "datetime":
    """Parse an ISO 8601 moment, in UTC unless it names another zone. Raise InvalidOption."""
    from datetime import UTC, datetime

    from vectormill.domain.errors import InvalidOption

    try:
        moment = datetime.fromisoformat(written)
    except ValueError as error:
        raise InvalidOption("--failed-since expects an ISO 8601 moment such as 2026-11-23T08:00.") from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _has_no_answer(delivery: Mapping[str, Any]) -> bool:
    return delivery["state"] == "pending" and delivery["error"] is None and delivery["status_code"] is None
