"""Commands for schedules, which say when collections are re-indexed, and the formatting of their output."""

import itertools
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

import typer

from vectormill.cli.command import Client, Names, command
from vectormill.cli.printing import listing, print_facts
from vectormill.cli.sources import parse_split, read_source
from vectormill.runs.run import describe_counts
from vectormill.schedules.schedule import OVERDUE_SECONDS

app = typer.Typer(
    no_args_is_help=True,
    epilog='Example: vectormill schedules create docs --cron "0 2 * * *" --timezone Europe/Berlin',
    help="Re-index collections at the times of a cron expression.",
)

Schedule = Mapping[str, Any]
Overlap = Literal["skip", "queue"]


def show_schedule(schedule: Schedule) -> None:
    """Print one line for each fact about a schedule, the most important first."""
    facts = [
        *((name, schedule[name]) for name in ("name", "collection")),
        ("cron", f"{schedule['cron']} ({schedule['timezone']})"),
        ("overlap", schedule["overlap"]),
        ("next due", describe_due(schedule)),
        ("last run", schedule["last_state"] or "none yet"),
        ("last success", describe_success(schedule)),
        ("consecutive failures", schedule["consecutive_failures"]),
        ("skipped since", schedule["skipped_since_success"] or None),
        ("last error", schedule["last_error"]),
    ]
    print_facts(facts)


@command(
    app,
    'vectormill schedules create docs --cron "0 2 * * *" --timezone Europe/Berlin',
    'vectormill schedules create docs --cron "*/15 8-18 * * MON-FRI" --name office --overlap queue',
    'vectormill schedules create docs --cron @daily --source "SELECT id, body FROM articles" --key id --text body',
    view=show_schedule,
)
def create(
    client: Client,
    collection: str,
    *,
    cron: str,
    timezone: str | None = None,
    overlap: Overlap | None = None,
    name: str | None = None,
    source: str | None = None,
    key: str | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    metadata: Names | None = None,
    split: str | None = None,
) -> Schedule:
    """Re-index a collection from its source at every due time from now on.

    Args:
        collection (COLLECTION): The collection to re-index; it needs a source.
        cron (EXPRESSION): Minute, hour, day of the month, month, day of the week; or @hourly, @daily, @weekly.
        timezone (ZONE): The time zone of the expression.  [default: UTC]
        overlap: When a run is due while another run of the collection is active: skip it, or queue it.
            [default: skip]
        name (NAME): The schedule's name. By default, the collection's.  [default: the collection's]
        source (WHERE): Also set the source: a query, a folder, or files. `sources set` has more options.
        key (COLUMN): The source's column with the keys.  [default: key]
        text (COLUMN): The source's column with the texts.  [default: text]
        metadata (COLUMN): A column to keep as metadata.
        split (HOW): Split texts into passages, as for `sources set`.
    """
    if source is not None:
        kind, options = read_source(source, key=key, text=text, metadata=metadata, text_pair=text_pair)
        client.set_source(collection, kind, options, split=parse_split(split))
    return client.create_schedule(collection, cron, timezone=timezone, overlap=overlap, name=name)


@command(
    app,
    "vectormill schedules list",
    name="list",
    view=listing(
        "name",
        "collection",
        "cron",
        ("next due", lambda schedule: describe_due(schedule)),
        ("last run", "last_state"),
        ("last success", lambda schedule: describe_success(schedule)),
        ("failures", "consecutive_failures"),
        ("last error", "last_error"),
    ),
)
def list_all(client: Client) -> Iterator[Schedule]:
    """List the schedules: when each is due, and the results of their runs."""
    return client.schedules()


@command(app, "vectormill schedules show docs", view=show_schedule)
def show(client: Client, schedule: str) -> Schedule:
    """Show a schedule: when it is due next, and the results of its runs."""
    return client.schedule(schedule)


@command(app, 'vectormill schedules change docs --cron "30 4 * * *"', view=show_schedule)
def change(
    client: Client,
    schedule: str,
    *,
    cron: str | None = None,
    timezone: str | None = None,
    overlap: Overlap | None = None,
) -> Schedule:
    """Change a schedule; options that are not given stay. A new expression or zone takes effect at once.

    Args:
        cron (EXPRESSION): The new cron expression.
        timezone (ZONE): The new time zone.
        overlap: Skip or queue overlapping runs.
    """
    return client.change_schedule(schedule, cron=cron, timezone=timezone, overlap=overlap)


@command(app, "vectormill schedules pause docs", view=show_schedule)
def pause(client: Client, schedule: str) -> Schedule:
    """Pause a schedule: due times pass until it is resumed. An active run continues."""
    return client.pause_schedule(schedule)


@command(app, "vectormill schedules resume docs", view=show_schedule)
def resume(client: Client, schedule: str) -> Schedule:
    """Resume a paused schedule. Due times that have passed are not made up."""
    return client.resume_schedule(schedule)


@command(app, "vectormill schedules run-now docs", name="run-now", view=lambda run: typer.echo(run["id"]))
def run_now(client: Client, schedule: str) -> Mapping[str, Any]:
    """Start a run now, apart from the due times, and print its id; it waits for an active run."""
    return client.run_schedule(schedule)


@command(app, "vectormill schedules delete docs")
def delete(client: Client, schedule: str) -> str:
    """Delete a schedule. Its runs stay, including an active one."""
    client.delete_schedule(schedule)
    return f"Deleted schedule {schedule}."


@command(
    app,
    "vectormill schedules history docs --limit 14",
    view=listing(
        ("run", "id"),
        ("due", lambda run: (run["due_at"] or "by hand")[:16]),
        "state",
        ("finished", lambda run: (run["finished_at"] or "")[:19]),
        ("rows", lambda run: describe_counts(run["counts"])),
        "error",
    ),
)
def history(client: Client, schedule: str, *, limit: int = 20) -> Iterator[Mapping[str, Any]]:
    """List a schedule's due times, newest first: runs, and skipped ones with the reason."""
    return itertools.islice(client.schedule_runs(schedule), limit)


def describe_due(schedule: Schedule) -> str:
    """Format when the schedule is next due, in its own time zone and in UTC."""
    if schedule["paused_at"] is not None:
        return f"paused since {_minute(schedule['paused_at'])} UTC"
    due_at = _minute(schedule["next_due_at"])
    local = schedule["next_due_local"]
    if local is None or schedule["timezone"] == "UTC":
        return f"{due_at} UTC"
    # Show the date in UTC only if it differs from the local date.
    in_utc = due_at if due_at[:10] != local[:10] else due_at[11:]
    return f"{_minute(local)} {schedule['timezone']} ({in_utc} UTC)"


def describe_success(schedule: Schedule) -> str:
    return f"{_minute(schedule['last_success_at'])} UTC" if schedule["last_success_at"] else "never"


def summarize_schedule(schedule: Schedule) -> str:
    """Describe the state of a schedule in one sentence; problems come first."""
    name, problems = schedule["name"], []
    if schedule["lag_seconds"] > OVERDUE_SECONDS:
        problems.append(f"overdue by {schedule['lag_seconds']:,.0f} s: is a scheduler running?")
    if schedule["consecutive_failures"]:
        times = (
            "once" if schedule["consecutive_failures"] == 1 else f"{schedule['consecutive_failures']} times"
        )
        problems.append(f"failed {times} since its last success ({describe_success(schedule)})")
    if schedule["skipped_since_success"]:
        problems.append(f"skipped {schedule['skipped_since_success']} due times since its last success")
    if problems and schedule["last_error"]:
        problems.append(str(schedule["last_error"]).rstrip("."))
    said = "; ".join(problems) or f"last success {describe_success(schedule)}"
    return f"Schedule {name} of {schedule['collection']}: {said}; next due {describe_due(schedule)}."


def _minute(moment: str) -> str:
    return datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M")
