"""TaskDemo: the jobs that `vectormill demo` submits for a task, and the table that it shows of their results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from vectormill.cli.exits import ITEMS_FAILED, CommandFailed, exit_code_of_job

if TYPE_CHECKING:
    from vectormill.cli.views.summary import Fact
    from vectormill.client import Client
    from vectormill.files.ndjson import ItemJson

Json = Mapping[str, Any]
# The results of a job by key.
Results = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model by its name, None for the service's own; `path` where it is not registered.

    `reason` says why this one, in a few words; `told` what weights these are, in a sentence.
    """

    model: str | None
    reason: str
    told: str
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A table under a title."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Tables for people, and figures for machines."""

    tables: Sequence[Listing]
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskDemo:
    """One task's row.

    `choose_weights` gets a directory that lives as long as the demo. `list_items` gets how many are wanted.
    `options` are the job's, `is_sound` says of a result that it is one, and `find` what there is to show of those.
    """

    task: str
    noun: str
    num_items: int
    choose_weights: Callable[[Path], DemoModel]
    list_items: Callable[[int], Sequence["ItemJson"]]
    read_results: Callable[["Client", str], Iterator[Json]]
    is_sound: Callable[[Json], bool]
    find: Callable[[Sequence["ItemJson"], Results], DemoReport]
    options: Mapping[str, Any] = field(default_factory=dict)


POLL_SECONDS: Final = 0.25


def run_task(
    client: "Client", demo: "TaskDemo", items: Sequence["ItemJson"], weights: "DemoModel", *, is_json: bool
) -> None:
    """Run a task's demo on a service. Raise CommandFailed unless every item has a sound result."""
    from vectormill.cli.views.job_watch import watch_job
    from vectormill.cli.views.summary import summarize_job

    job = client.submit(items, model=weights.model, task=demo.task, **demo.options)
    typer.echo(f"Submitted {job['num_items']:,} {demo.noun}s as job {job['id']}.", err=True)
    job = watch_job(client, job, poll_seconds=POLL_SECONDS)
    wanted = {item["key"] for item in items}
    results = {
        result["key"]: result
        for result in demo.read_results(client, job["id"])
        if result["key"] in wanted and demo.is_sound(result)
    }
    findings = demo.find(items, results)
    report(
        demo,
        job,
        summarize_job(job, client.workers(), weights.reason),
        findings,
        len(results),
        is_json=is_json,
    )
    if len(results) < len(items):
        raise CommandFailed(
            f"{len(items) - len(results):,} of {len(items):,} {demo.noun}s have no result; job {job['id']} "
            f"{job['state']}.",
            exit_code_of_job(job["state"]) or ITEMS_FAILED,
        )


def report(
    demo: "TaskDemo",
    job: Mapping[str, Any],
    summary: Sequence["Fact"],
    findings: "DemoReport",
    num_results: int,
    *,
    is_json: bool,
) -> None:
    from vectormill.cli.views.listing import print_json, print_report

    if is_json:
        choices = {line.name: {"value": line.value, "reason": line.reason} for line in summary}
        print_json(
            {"job": job, "num_results": num_results, "summary": choices, "findings": dict(findings.figures)}
        )
        return
    print_report("The job", ("", "", ""), [(line.name, line.value, line.reason) for line in summary])
    for table in findings.tables:
        print_report(table.title, table.columns, table.rows)
    typer.echo(f"\n{num_results:,} of {job['num_items']:,} {demo.noun}s have their result.")
