"""The service: which models it knows and which workers are alive."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from vectormill.cli.options import Json, with_client

if TYPE_CHECKING:
    from vectormill.client import Client

app = typer.Typer()


@app.command(epilog="Example: vectormill models")
@with_client
def models(client: "Client", json: Json = False) -> None:
    """List the registered models."""
    found = client.models()
    _print_records(
        found, ("name", "task", "dimension", "max_tokens", "pooling", "normalize", "workers", "problem"), json
    )


@app.command(epilog="Example: vectormill workers")
@with_client
def workers(client: "Client", json: Json = False) -> None:
    """List the live workers with their devices, and the reasons for their settings."""
    from vectormill.cli.views.summary import CHOICES, describe_choice, describe_plan

    found = client.workers()
    if json:
        _print_records(found, (), json)
        return
    rows = []
    for worker in found:
        described = {"name": worker["name"], "model": worker["model"], "state": worker["report"].get("state")}
        for name in CHOICES:
            value, reason = describe_choice(worker["report"], name)
            described[name] = f"{value} ({reason})" if reason else value
        described["plan"] = describe_plan(worker["report"])
        rows.append(described)
    _print_records(rows, ("name", "model", "state", *CHOICES, "plan"), json)


def _print_records(records: Sequence[Mapping[str, Any]], columns: tuple[str, ...], is_json: bool) -> None:
    from vectormill.cli.views.listing import print_json, print_table

    if is_json:
        for record in records:
            print_json(record)
        return
    print_table(columns, [[record.get(column) for column in columns] for record in records])
