"""Commands that re-index a collection and show, cancel and confirm runs, and their output."""

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from vectormill.cli.command import Client, command, top
from vectormill.cli.exits import EXIT_CODES_HELP, exit_code_of_job
from vectormill.cli.printing import Outcome, follow, listing, print_facts, tell
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.options import find_given
from vectormill.jobs.job import RUNNING
from vectormill.runs.run import CHANGES, COMPLETED, READING, ReindexOptions, describe_counts

if TYPE_CHECKING:
    from vectormill.client.progress import ProgressView

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill runs list --collection docs",
    help="Show, cancel and confirm re-indexes, builds of indexes and checks.",
)

Run = Mapping[str, Any]


def show_run(run: Run) -> None:
    counts = {name: number for name, number in run["counts"].items() if number}
    told = {name: value for name, value in run.items() if name not in ("counts", "report", "options", "spec")}
    asked = {name: describe_findings(run.get(name) or {}) for name in ("options", "spec")}
    found = {f"{phase} found": describe_findings(each) for phase, each in run["report"].items()}
    print_facts((told | asked | counts | found).items())
    if run["counts"].get("num_failed") and run["job_id"]:
        tell(f"`vectormill errors {run['job_id']}` lists the failed items and why.")
    if run["state"] == "held":
        tell(f"Confirm it with `vectormill runs confirm {run['id']}`.")


def show_reindexed(run: Run) -> None:
    """Print what a re-index did in short if all went well, and else all that is known of it."""
    if run["state"] != COMPLETED:
        show_run(run)
        return
    print_facts([("id", run["id"]), ("state", run["state"]), ("rows", describe_run_counts(run))])
    since = run["report"].get(READING, {}).get(CHANGES, {}).get("since")
    if since is not None:
        tell(
            f"Only rows that changed since {since} were read. A full run (--full) also finds rows that were deleted."
        )


@command(
    top,
    "vectormill reindex docs",
    "vectormill reindex docs --model bge-m3 --no-wait",
    note=f"`vectormill runs show RUN` says what each phase found. With --wait: {EXIT_CODES_HELP}",
    view=show_reindexed,
)
def reindex(
    client: Client,
    collection: str,
    *,
    model: str | None = None,
    options: EncodingOptions,
    run: ReindexOptions,
    wait: bool = True,
) -> Outcome:
    """Bring a collection in step with its source: encode new and changed rows, delete vanished ones.

    With another model, or another option that decides vectors, a new generation is built alongside the live one, which
    is searched until the new one is complete.

    Args:
        collection (COLLECTION): The collection; it needs a source or kept texts.
    """
    started = client.reindex(collection, model=model, **find_given(options), **find_given(run))
    if not wait:
        return Outcome(started, 0)
    ended = follow(client.wait_run, started["id"], look_at_run)
    return Outcome(ended, exit_code_of_job(ended["state"]))


@command(
    app,
    "vectormill runs list --collection docs --limit 10",
    name="list",
    view=listing(
        "id",
        "collection",
        ("run", lambda run: f"{run['kind']}: {describe_stage(run)}"),
        ("rows", lambda run: describe_run_counts(run)),
        ("created", lambda run: run["created_at"][:16].replace("T", " ")),
    ),
)
def list_all(client: Client, *, collection: str | None = None, limit: int = 50) -> Iterator[Run]:
    """List runs, newest first.

    Args:
        collection (NAME): List only runs of this collection.
    """
    return itertools.islice(client.runs(collection), limit)


@command(app, "vectormill runs show RUN", "vectormill runs show RUN --watch", view=show_run)
def show(client: Client, run_id: str, *, watch: bool = False) -> Outcome:
    """Show a run: its phase, its counts, and what each phase found.

    Args:
        watch: Follow the run until it ends.
    """
    if not watch:
        return Outcome(client.run(run_id), 0)
    run = follow(client.wait_run, run_id, look_at_run)
    return Outcome(run, exit_code_of_job(run["state"]))


@command(app, "vectormill runs cancel RUN", view=show_run)
def cancel(client: Client, run_id: str) -> Run:
    """Cancel a run and its encoding job. Rows that it has already written stay."""
    return client.cancel_run(run_id)


@command(app, "vectormill runs confirm RUN && vectormill runs show RUN --watch", view=show_run)
def confirm(client: Client, run_id: str) -> Run:
    """Let a held run continue; `runs show` says why it is held."""
    return client.confirm_run(run_id)


def look_at_run(run: Run) -> "ProgressView":
    """Return the progress of a run: its phase, and the progress of its job or else the rows read."""
    from vectormill.client import progress

    encoding = run.get("encoding")
    if encoding is None:
        return progress.ProgressView(describe_stage(run), describe_run_counts(run))
    share = progress.count_ended(encoding) / encoding["num_items"] if encoding["num_items"] else None
    return progress.ProgressView(
        describe_stage(run), progress.describe_counts(encoding | {"state": RUNNING}), share
    )


def describe_stage(run: Run) -> str:
    """Return the phase of a running run, or else the run's state."""
    return str(run["phase"]) if run["state"] == "running" and run["phase"] else str(run["state"])


def describe_run_counts(run: Run) -> str:
    """Format how many rows a run has read and changed as one line, without zeros."""
    # A source was empty, or not needed.
    nothing = "no rows read" if run.get("finished_at") else "nothing read yet"
    return describe_counts(run["counts"]) or nothing


def describe_findings(found: Mapping[str, Any], separator: str = " · ") -> str:
    """Format findings as one line of names and values, without empty, unknown, false and zero ones."""

    def describe(value: Any) -> str:
        if isinstance(value, dict):
            return describe_findings(value, ", ")
        return f"{value:,}" if isinstance(value, int) else str(value)

    told = []
    for name, value in found.items():
        words = name.removeprefix("num_").replace("_", " ")
        if value in (None, False, "", [], {}):
            continue
        if value is True:
            told.append(words)
        elif isinstance(value, dict):
            told.append(f"{words}: {describe(value)}")
        elif isinstance(value, list):
            told.append(f"{words}: {'; '.join(map(describe, value))}")
        else:
            told.append(f"{value:,} {words}" if name.startswith("num_") else f"{words} {describe(value)}")
    return separator.join(told)


def look_at_indexing(run: Run) -> "ProgressView":
    """Return the progress of an index run: the current build, its phase and its share done."""
    from vectormill.client.progress import ProgressView

    build = run["report"].get("indexing", {}).get("progress") or {}
    share = build.get("share")
    stage = f"{build['index']}: {build['phase']}" if build and run["state"] == RUNNING else run["state"]
    return ProgressView(stage, "" if share is None else f"{share:.0%}", share)


def describe_outcome(run: Run) -> list[str]:
    """List what an index run did, one line for each build or removal, with reasons."""
    found = run["report"].get("indexing", {})
    lines = [
        f"Built {made['name']} in {made['seconds']:,.1f} s, {made['num_bytes'] / (1 << 20):,.1f} MiB."
        for made in found.get("built", ())
    ]
    lines += [f"Dropped {gone['name']}: {gone['because']}" for gone in found.get("dropped", ())]
    lines += [f"Kept {name}." for name in found.get("kept", ())]
    lines += found.get("plan", {}).get("reasons", ())
    lines += [str(notice) for notice in found.get("notices", ())]
    return lines + ([run["error"]] if run["error"] else [])
