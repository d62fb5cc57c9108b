"""Pages of jobs: the list, a job with its actions, errors and results, and the queue of waiting work."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from pydantic import BeforeValidator
from sqlalchemy import Connection

from api.console.console import Console, Page
from api.console.formats import round_shares
from api.console.history import (
    BUSY_STAGES,
    Interval,
    StageInterval,
    chart_rate,
    chart_stages,
    find_runs,
    share_of,
)
from api.dependencies import JobId, ResourcesDependency
from api.routes.jobs import JOB_CHANGES, change_job, refuse_unknown_state
from api.routes.results import get_results, get_vectors
from api.serving import cut_page, decode_cursor
from api.streams.row_streams import ResultResponse
from vectormill.domain.task import RESULTS, VECTOR
from vectormill.files.formats import OUTPUT_FORMATS, OutputName, RowsName
from vectormill.jobs.backlog import Waiting, count_open_jobs, list_waiting
from vectormill.jobs.bottleneck import WAIT
from vectormill.jobs.job import (
    FILE,
    JOB_STATE_BY_NAME,
    QUEUED,
    RUNNING,
    UPLOADING,
    Job,
)
from vectormill.jobs.jobs import ItemError, find_job, list_item_errors, list_jobs
from vectormill.jobs.operations import ResultQuery, VectorQuery
from vectormill.jobs.wait_reasons import explain_waits
from vectormill.workers.workers import REDIS_AWAY, REDIS_FULL, SCHEDULER, count_workers, list_signs_of_life

router = APIRouter(include_in_schema=False)

JOBS_ON_A_PAGE: Final = 50
ERRORS_AT_ONCE: Final = 10
ERRORS_ON_A_PAGE: Final = 100
# The queue page explains the newest jobs of each state only; its table counts all.
MAX_EXPLAINED: Final = 50


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage in which a job's chunks were worked on: its seconds and its share, and the share in whole percents."""

    name: str
    seconds: float
    share: float
    percent: int


@dataclass(frozen=True, slots=True)
class Action:
    """A button: the name of its action, its label, and the question that the browser asks before it."""

    name: str
    title: str
    question: str | None = None


PAUSE: Final = Action("pause", "Pause")
RESUME: Final = Action("resume", "Resume")
RETRY: Final = Action("retry", "Retry failed texts")
CANCEL: Final = Action(
    "cancel",
    "Cancel",
    "Cancel this job? Vectors already committed are kept; the remaining texts are not encoded.",
)


@dataclass(frozen=True, slots=True)
class JobView:
    """A job with the reason why it waits, its first errors, and its history while somebody viewed it."""

    job: Job
    waiting_because: str | None
    errors: Sequence[ItemError] = ()
    has_more_errors: bool = False
    stretches: Sequence[Interval] = ()

    @property
    def title(self) -> str:
        """Return the collection of the job, else the file of its texts, the place of its results, or what they are."""
        job = self.job
        file = job.metadata.get(FILE)
        named = (
            job.collection or (file if isinstance(file, str) else "") or job.output_table or job.output_url
        )
        kept_as = RESULTS[job.spec.result].kept_as.capitalize()
        return named or f"{kept_as} of {job.num_items:,} {'text' if job.num_items == 1 else 'texts'}"

    @property
    def done_share(self) -> float:
        return share_of(self.job.num_done, self.job.num_items)

    @property
    def failed_share(self) -> float:
        return share_of(self.job.num_failed, self.job.num_items)

    @property
    def actions(self) -> list[Action]:
        """Return the actions that the job allows now and that change it, in the order of the buttons."""
        job = self.job
        leads_to = JOB_STATE_BY_NAME[job.state].leads_to
        actions = [action for action in (PAUSE, RESUME) if leads_to.get(action.name, job.state) != job.state]
        if job.num_failed and RETRY.name in leads_to:
            actions.append(RETRY)
        if leads_to.get(CANCEL.name, job.state) != job.state or job.is_left_to_indexer:
            actions.append(CANCEL)
        return actions

    @property
    def stages(self) -> list[StageRow]:
        spent = {stage: self.job.stage_seconds.get(stage, 0.0) for stage in BUSY_STAGES}
        shares = [share_of(seconds, sum(spent.values())) for seconds in spent.values()]
        rows = zip(spent, spent.values(), shares, round_shares(shares), strict=True)
        return [StageRow(*row) for row in rows if row[1]]

    @property
    def waited_seconds(self) -> float:
        """Return how long a chunk waited for the device on average, while others were computed."""
        return share_of(self.job.stage_seconds.get(WAIT, 0.0), self.job.num_chunks - self.job.num_open_chunks)

    @property
    def runs(self) -> list[StageInterval]:
        return find_runs(self.stretches)

    @property
    def rate_chart(self) -> dict[str, Any] | None:
        return chart_rate(self.stretches)

    @property
    def stage_chart(self) -> dict[str, Any] | None:
        return chart_stages(self.stretches)

    @property
    def options(self) -> dict[str, Any]:
        """Return the job's encoding options without empty ones, whether given or taken from the model."""
        return {
            name: value for name, value in self.job.spec.describe().items() if value not in (None, "", [], {})
        }

    @property
    def exports(self) -> list[str]:
        """Return the formats in which the job's results can be exported now."""
        if self.job.state == UPLOADING or not (self.job.is_terminal or self.job.num_done):
            return []
        return [
            name for name, row in OUTPUT_FORMATS.items() if self.job.spec.result == VECTOR or row.has_keys
        ]

    @property
    def results(self) -> str:
        return RESULTS[self.job.spec.result].route


@dataclass(frozen=True, slots=True)
class JobsView:
    """One page of the list of jobs. `open_jobs` counts the jobs that have not ended, by state."""

    rows: list[JobView]
    next: str | None
    open_jobs: Counter[str]
    state: str | None
    is_first: bool
    collection: str = ""
    since: date | None = None
    until: date | None = None

    def find_query(self, **other: str | None) -> dict[str, str | None]:
        """Return the parameters of this page's address with others, without a place in the list."""
        days = {"since": self.since, "until": self.until}
        told = {name: day.isoformat() if day else None for name, day in days.items()}
        return {"state": self.state, "collection": self.collection or None, **told, **other}


Day = Annotated[date | None, BeforeValidator(lambda given: given or None)]  # a form sends an empty field


def read_jobs(
    connection: Connection,
    console: Console,
    state: str | None = None,
    after: str | None = None,
    collection: Annotated[str, Query(pattern=r"^[^\x00]*$")] = "",  # Postgres knows no NUL
    since: Day = None,
    until: Day = None,
) -> JobsView:
    """Return a page of jobs, newest first: of one state or of all, of a collection, of days from `since` to `until`.

    Days are those of UTC. Raise Problem for an unknown state.
    """
    state = state or None
    refuse_unknown_state(state)
    jobs = list_jobs(
        connection,
        state=state,
        collection=collection.strip() or None,
        since=begin_of(since),
        until=begin_of(until + timedelta(days=1) if until and until < date.max else None),
        before_seq=decode_cursor(after),
        limit=JOBS_ON_A_PAGE + 1,
    )
    page, following = cut_page(jobs, JOBS_ON_A_PAGE, lambda job: job.seq)
    reasons = explain_waits(connection, page)
    counts: Counter[str] = Counter()
    for entry in count_open_jobs(connection):
        counts[entry.state] += entry.num_jobs
    for job in page:
        if not job.is_terminal:
            console.histories.note(job)
    return JobsView(
        [JobView(job, reasons.get(job.id)) for job in page],
        following,
        counts,
        state,
        after is None,
        collection.strip(),
        since,
        until,
    )


def begin_of(day: date | None) -> datetime | None:
    return None if day is None else datetime.combine(day, time(), UTC)


def read_job(connection: Connection, console: Console, job_id: JobId) -> JobView:
    """Return a job with its first errors, and add a sample of it to the histories. Raise JobNotFound."""
    errors = list_item_errors(connection, job_id, after=None, limit=ERRORS_AT_ONCE + 1)
    job = find_job(connection, job_id)
    reason = explain_waits(connection, [job]).get(job_id)
    console.histories.note(job)
    return JobView(
        job, reason, errors[:ERRORS_AT_ONCE], len(errors) > ERRORS_AT_ONCE, console.histories.find(job_id)
    )


@dataclass(frozen=True, slots=True)
class ErrorsView:
    """One page of the failed items of a job, in the order of submission."""

    job: Job
    errors: list[ItemError]
    next: str | None
    is_first: bool


def read_errors(
    connection: Connection, console: Console, job_id: JobId, after: str | None = None
) -> ErrorsView:
    errors = list_item_errors(connection, job_id, after=decode_cursor(after), limit=ERRORS_ON_A_PAGE + 1)
    page, following = cut_page(errors, ERRORS_ON_A_PAGE, lambda error: error.item)
    return ErrorsView(find_job(connection, job_id), page, following, after is None)


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why jobs wait, the number of jobs with that reason, and one of them as an example."""

    text: str
    num_jobs: int
    example: Job


@dataclass(frozen=True, slots=True)
class QueueView:
    """The waiting work by model and priority, and the reasons why it waits."""

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


def read_queue(connection: Connection, console: Console) -> QueueView:
    signs = list_signs_of_life(connection)
    return QueueView(
        list_waiting(connection),
        count_workers(connection),
        list_reasons(connection),
        SCHEDULER in signs,
        not signs & {REDIS_AWAY, REDIS_FULL},
    )


def list_reasons(connection: Connection) -> list[Reason]:
    """List the reasons why the newest open jobs wait, the most common first."""
    jobs = [
        job
        for state in (RUNNING, QUEUED)
        for job in list_jobs(connection, state=state, before_seq=None, limit=MAX_EXPLAINED)
    ]
    reasons = explain_waits(connection, jobs)
    examples = {reasons[job.id]: job for job in jobs if job.id in reasons}
    return [Reason(text, count, examples[text]) for text, count in Counter(reasons.values()).most_common()]


PAGES: Final = (
    Page(path="/console/jobs", title="Jobs", template="jobs.html", above="jobs_form.html", read=read_jobs),
    Page(
        path="/console/jobs/{job_id}",
        title="Job {job_id!s:.8}",
        template="job.html",
        read=read_job,
        actions={name: partial(change_job, change) for name, change in JOB_CHANGES.items()},
        is_last=lambda view: view.job.is_terminal,
    ),
    Page(
        path="/console/jobs/{job_id}/errors",
        title="Failed texts of job {job_id!s:.8}",
        template="errors.html",
        read=read_errors,
        is_last=lambda view: view.job.is_terminal,
    ),
    Page(
        path="/console/queue",
        title="Queue",
        lead="Texts that have no vector yet, by model and priority; 0 is the most urgent, 9 the least.",
        template="queue.html",
        read=read_queue,
    ),
)


@router.get("/console/jobs/{job_id}/results")
def get_export(
    resources: ResourcesDependency, job_id: JobId, format: Annotated[OutputName, Query()] = "ndjson"
) -> ResultResponse:
    """Return the job's results as a file for a visitor with a session. The API's routes accept only a key."""
    with resources.engine.connect() as connection:
        job = find_job(connection, job_id)
    if job.spec.result == VECTOR:
        return get_vectors(resources, job_id, VectorQuery(format=format, partial=True))
    rows: RowsName = "parquet" if format == "parquet" else "ndjson"
    return get_results(resources, job_id, ResultQuery(format=rows, partial=True))
