"""JobBodies: jobs as the API answers them, each with what it waits for."""

from collections.abc import Sequence

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from api.schemas import JobBody
from vectormill.jobs.job import Job
from vectormill.jobs.waiting import explain_waits


def describe_jobs(connection: Connection, jobs: Sequence[Job]) -> list[JobBody]:
    """In the given order. Looks at workers and queues only if one of the jobs is open."""
    reasons = explain_waits(connection, jobs)
    return [JobBody.from_job(job, reasons.get(job.id)) for job in jobs]


def describe_job(connection: Connection, job: Job) -> JobBody:
    (body,) = describe_jobs(connection, [job])
    return body


def describe_new_job(engine: Engine, job: Job) -> JobBody:
    """Describe a job that was committed before: whatever happens now, the answer is that it is there."""
    try:
        with engine.connect() as connection:
            return describe_job(connection, job)
    except SQLAlchemyError:
        return JobBody.from_job(job)
