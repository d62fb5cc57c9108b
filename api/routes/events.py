"""A job's progress over HTTP as Server-Sent Events, until the job has ended."""

from fastapi import APIRouter

from api.dependencies import JobId, ResourcesDependency
from api.event_stream import EventStream
from api.serving import serve, write_answer
from vectormill.jobs import operations
from vectormill.jobs.job import TERMINAL_JOB_STATES
from vectormill.jobs.jobs import find_job
from vectormill.jobs.operations import JobBody
from vectormill.jobs.waiting import make_job_body

router = APIRouter(tags=["jobs"])


class JobEvents(EventStream[JobBody]):
    def read(self) -> JobBody:
        with self._resources.engine.connect() as connection:
            return make_job_body(connection, find_job(connection, self._key))

    def write(self, value: JobBody) -> bytes:
        name = b"end" if self.is_last(value) else b"progress"
        return b"event: %s\ndata: %s\n\n" % (name, write_answer(value))

    def is_last(self, value: JobBody) -> bool:
        return value["state"] in TERMINAL_JOB_STATES

    def has_moved(self, last: JobBody, value: JobBody) -> bool:
        """The end of a wait is not reported, since the progress of items shows it."""
        if any(value[name] != last[name] for name in ("state", "num_done", "num_failed")):
            return True
        return value["waiting_because"] not in (None, last["waiting_because"])


@serve(router, operations.FOLLOW)
async def get_events(resources: ResourcesDependency, job_id: JobId) -> JobEvents:
    """Send `progress` events with the job as data whenever it has changed; the last event is `end`."""
    return JobEvents(resources, resources.watch, job_id)
