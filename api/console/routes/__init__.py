"""One file per page of the console; each turns a request into calls of vectormill and their answer into a page."""

from typing import Final

from fastapi import APIRouter

from api.console.routes import collections, entry, jobs, queue, runs, schedules, workers

CONSOLE_ROUTERS: Final[tuple[APIRouter, ...]] = (
    entry.router,
    jobs.router,
    queue.router,
    workers.router,
    collections.router,
    schedules.router,
    runs.router,
)
