"""The console's queue: what waits, by model and priority, since when, and why."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection

from api.console.console import Console, ConsoleDependency
from api.console.live import LiveStream, Rendered
from api.dependencies import Resources, ResourcesDependency
from vectormill.jobs.backlog import Waiting, list_waiting
from vectormill.jobs.job import QUEUED, RUNNING, Job
from vectormill.jobs.jobs import list_jobs
from vectormill.jobs.waiting import explain_waits
from vectormill.workers.workers import REDIS_AWAY, REDIS_FULL, SCHEDULER, count_workers, list_signs_of_life

router = APIRouter(include_in_schema=False)

# The newest jobs of each state, whose reasons are told; the table above counts all.
MAX_EXPLAINED: Final = 50


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why jobs wait, how many jobs have it, and one of them."""

    text: str
    num_jobs: int
    example: Job


@dataclass(frozen=True, slots=True)
class QueueView:
    """The contents of the page."""

    waiting: list[Waiting]
    num_workers: dict[str, int]
    reasons: list[Reason]
    is_scheduler_alive: bool
    is_redis_well: bool

    @property
    def num_items(self) -> int:
        return sum(entry.num_items for entry in self.waiting)

    @property
    def num_jobs(self) -> int:
        return sum(entry.num_jobs for entry in self.waiting)

    @property
    def oldest_seconds(self) -> float | None:
        return max((entry.oldest_seconds for entry in self.waiting if entry.oldest_seconds), default=None)


def load_queue(connection: Connection) -> QueueView:
    signs = list_signs_of_life(connection)
    return QueueView(
        list_waiting(connection),
        count_workers(connection),
        list_reasons(connection),
        SCHEDULER in signs,
        not signs & {REDIS_AWAY, REDIS_FULL},
    )


def list_reasons(connection: Connection) -> list[Reason]:
    """List why the newest open jobs wait, the most common reason first."""
    jobs = [
        job
        for state in (RUNNING, QUEUED)
        for job in list_jobs(connection, state=state, before_seq=None, limit=MAX_EXPLAINED)
    ]
    reasons = explain_waits(connection, jobs)
    examples = {reasons[job.id]: job for job in jobs if job.id in reasons}
    return [Reason(text, count, examples[text]) for text, count in Counter(reasons.values()).most_common()]


def render_queue(resources: Resources, console: Console) -> Rendered:
    with resources.engine.connect() as connection:
        view = load_queue(connection)
    return Rendered(console.render("queue/backlog.html", None, view=view))


@router.get("/console/queue")
async def get_queue(
    request: Request, resources: ResourcesDependency, console: ConsoleDependency
) -> HTMLResponse:
    backlog = await run_in_threadpool(render_queue, resources, console)
    return console.page(request, "queue/page.html", backlog=backlog.html)


@router.get("/console/queue/live")
async def get_live_queue(resources: ResourcesDependency, console: ConsoleDependency) -> LiveStream:
    return LiveStream(resources, console.views, "queue", lambda: render_queue(resources, console))
