"""The console's workers: what each runs on, how it did in the last minutes, and the plan that it has a part in."""

from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from api.console.console import Console, ConsoleDependency
from api.console.facts.workers import WorkerLine, read_detail, read_line
from api.console.live import LiveStream, Rendered
from api.dependencies import Resources, ResourcesDependency
from api.problems import Problem
from vectormill.workers.workers import ALIVE_SECONDS, find_worker, list_plan_parts, list_workers

router = APIRouter(include_in_schema=False)

# A line is about a kilobyte, and all lines are sent again when one has changed.
MOST_LINES: Final = 200
MOST_NAME_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class WorkersView:
    """`lines` are the first by name; the numbers are of all. `rate` is None while no worker has told one."""

    lines: list[WorkerLine]
    num_workers: int
    num_models: int
    rate: float | None


def render_list(resources: Resources, console: Console) -> Rendered:
    with resources.engine.connect() as connection:
        lines = [read_line(worker) for worker in list_workers(connection)]
    rates = [line.rate for line in lines if line.rate is not None]
    view = WorkersView(
        lines=lines[:MOST_LINES],
        num_workers=len(lines),
        num_models=len({line.model for line in lines}),
        rate=sum(rates) if rates else None,
    )
    return Rendered(console.render("workers/list.html", None, view=view))


def render_one(resources: Resources, console: Console, name: str) -> Rendered:
    """Render a worker; a silent one is shown as gone for good, since its next process may run on another device."""
    with resources.engine.connect() as connection:
        worker = find_worker(connection, name)
        parts = list_plan_parts(connection, name)
    if worker is None:
        return Rendered(console.render("workers/gone.html", None, worker=name), is_last=True)
    return Rendered(console.render("workers/one.html", None, detail=read_detail(worker, parts)))


def check_worker_name(name: str) -> str:
    """Refuse a name that no worker can have, which may be no text that Postgres takes. Raise Problem."""
    if len(name) > MOST_NAME_CHARS or not name.isprintable():
        raise _not_found(name)
    return name


def _not_found(name: str) -> Problem:
    return Problem(
        404, "worker-not-found", f"No worker {name[:MOST_NAME_CHARS]!r} is alive; see /console/workers."
    )


@router.get("/console/workers")
async def get_workers(
    request: Request, resources: ResourcesDependency, console: ConsoleDependency
) -> HTMLResponse:
    part = await run_in_threadpool(render_list, resources, console)
    return console.page(request, "workers/page.html", part=part.html, alive_seconds=ALIVE_SECONDS)


@router.get("/console/live/workers")
async def get_live_workers(resources: ResourcesDependency, console: ConsoleDependency) -> LiveStream:
    return LiveStream(resources, console.views, "workers", lambda: render_list(resources, console))


@router.get("/console/workers/{name:path}")
async def get_worker(
    request: Request, name: str, resources: ResourcesDependency, console: ConsoleDependency
) -> HTMLResponse:
    part = await run_in_threadpool(render_one, resources, console, check_worker_name(name))
    if part.is_last:
        raise _not_found(name)
    return console.page(request, "workers/detail.html", worker=name, part=part.html)


@router.get("/console/live/workers/{name:path}")
async def get_live_worker(
    name: str, resources: ResourcesDependency, console: ConsoleDependency
) -> LiveStream:
    worker = check_worker_name(name)
    return LiveStream(
        resources, console.views, f"worker {worker}", lambda: render_one(resources, console, worker)
    )
