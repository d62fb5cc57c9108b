"""JobWatch: a job that a command waits for, shown until it ends, or until no worker can load its model."""

import time
from collections.abc import Mapping
from typing import Any, Final

from vectormill.cli.exits import UNAVAILABLE, CommandFailed
from vectormill.client import Client
from vectormill.client.progress import Progress
from vectormill.client.views import look_at_job
from vectormill.jobs.bodies import JobBody

# A worker tries to load its model again after 30 s, and what was in its way may have passed by then.
PATIENCE_SECONDS: Final = 45.0


def watch_job(
    client: Client, job: Mapping[str, Any], *, poll_seconds: float = 0.5, is_patient: bool = False
) -> JobBody:
    """Show how a job goes until it ends, and return it as it is then.

    Raise CommandFailed when no live worker has been able to load its model for PATIENCE_SECONDS, unless `is_patient`.
    The job itself waits on.
    """
    with Progress(look_at_job) as progress:
        look = progress if is_patient else _LoadWatch(client, progress)
        return client.wait(job["id"], look, poll_seconds=poll_seconds)


class _LoadWatch:
    """Shows each answer, and asks about the workers when the job has waited for long."""

    def __init__(self, client: Client, show: Progress) -> None:
        self._client = client
        self._show = show
        self._since: float | None = None

    def __call__(self, job: Mapping[str, Any]) -> None:
        self._show(job)
        now = time.monotonic()
        if not job.get("waiting_because"):
            self._since = None
        elif self._since is None:
            self._since = now
        if self._since is None or now < self._since + PATIENCE_SECONDS:
            return
        self._since = now
        workers = [worker for worker in self._client.workers() if worker["model"] == job["model"]]
        # One that cannot load its model has no slots. Where there is none at all, one may be loading.
        if workers and not any(worker["slots"] for worker in workers):
            raise CommandFailed(
                f"{job['waiting_because']} Nothing was written. Job {job['id']} stays, and goes on when a worker has "
                f"loaded its model: `vectormill status {job['id']} --watch` waits for that, `vectormill export "
                f"{job['id']} -o OUT` writes what it makes, and `vectormill cancel {job['id']}` gives it up.",
                UNAVAILABLE,
            )
