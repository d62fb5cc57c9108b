"""One task's demo on a service that is there: submits its items, waits, reads every result and shows what they say."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import typer

from vectormill.cli.exits import ITEMS_FAILED, CommandFailed, exit_code_of_job

if TYPE_CHECKING:
    from vectormill.cli.demos.task_demo import Findings, TaskDemo, Weights
    from vectormill.cli.views.summary import Line
    from vectormill.client import Client
    from vectormill.files.ndjson import ItemJson

POLL_SECONDS: Final = 0.25


def run_task(
    client: "Client", demo: "TaskDemo", items: Sequence["ItemJson"], weights: "Weights", *, is_json: bool
) -> None:
    """Raises CommandFailed unless every item has a sound result."""
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
    summary: Sequence["Line"],
    findings: "Findings",
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
