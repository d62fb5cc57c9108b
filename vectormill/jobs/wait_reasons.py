"""Explain why a job makes no progress, in a sentence that says what to do.

Pure functions choose the sentence. The facts are read in a few short statements, whose cost does not grow
with the number of ended chunks.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar
from uuid import UUID

from sqlalchemy import Connection, TextClause, text

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import ModelNotServed
from vectormill.jobs.chunk import read_known
from vectormill.jobs.chunks import claim_chunk
from vectormill.jobs.completion import fail_chunk
from vectormill.jobs.item import MODEL_NOT_LOADED, Item, ItemFailure
from vectormill.jobs.job import (
    DISPATCHED_JOB_STATES,
    INTERACTIVE_PRIORITY,
    PAUSED,
    STEERABLE_JOB_STATES,
    Job,
)
from vectormill.jobs.operations import JobBody, describe_job
from vectormill.workers.workers import (
    INDEXER,
    IS_ALIVE,
    REDIS_AWAY,
    REDIS_FULL,
    SCHEDULER,
    list_signs_of_life,
)

# Workers claim a chunk within milliseconds of its message. This is longer than Redis needs to come back.
UNCLAIMED_SECONDS: Final = 15.0
# The state of a worker whose model is ready to encode; in any other state a reason is reported.
_READY: Final = "running"
# The number of names in a sentence; further ones are only counted.
_MAX_NAMES: Final = 5


@dataclass(frozen=True, slots=True)
class ServingWorker:
    """A live worker.

    A field that it does not report, for example while its model loads, is None and counts as a match. A
    worker that cannot load its model has no slots; `seconds_since_start` then counts from its first failure.
    """

    name: str
    model: str
    slots: int
    revision: str | None = None
    pooling: str | None = None
    state: str | None = None
    state_reason: str | None = None
    max_tokens_in_flight: int | None = None
    seconds_since_start: float = 0.0
    aliases: Sequence[str] | None = None

    def has_model_of(self, spec: EncodingSpec) -> bool:
        has_revision = self.revision is None or spec.revision in (self.revision, *(self.aliases or ()))
        return has_revision and self.pooling in (None, spec.model_pooling)

    @property
    def is_ready(self) -> bool:
        return self.state in (None, _READY)


@dataclass(frozen=True, slots=True)
class DispatchedChunks:
    """The dispatched chunks of a job, both queued and leased. Expired leases are left out."""

    job_id: UUID
    model: str
    priority: int
    num_queued: int
    num_leased: int
    oldest_queued_seconds: float
    num_tokens: int = 0  # estimated


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The state of workers, queues and scheduler that can explain why jobs wait.

    `setbacks` maps a job to its last error if all of its pending chunks are in a retry backoff.
    """

    workers: Sequence[ServingWorker]
    in_hand: Sequence[DispatchedChunks]
    is_scheduler_alive: bool
    is_redis_away: bool
    is_redis_full: bool
    setbacks: Mapping[UUID, str]


def explain_wait(job: Job, around: ClusterState) -> str | None:
    """Explain what the job waits for; None if it makes progress, is about to, or is not supposed to.

    Permanent causes are checked first: chunks that no worker can encode are dispatched again and again, and
    now and then one of them is leased.
    """
    if job.state == PAUSED:
        return f"The job is paused; resume it with `vectormill resume {job.id}`."
    if job.state not in DISPATCHED_JOB_STATES:
        return None
    if (absence := explain_absence(job.spec, around.workers)) is not None:
        return absence
    model = job.spec.model
    serving = [worker for worker in around.workers if worker.model == model]
    mine = next((chunks for chunks in around.in_hand if chunks.job_id == job.id), None)
    if mine is not None and mine.num_leased:
        return None
    if not around.is_scheduler_alive:
        return "There is no live scheduler, so nothing is dispatched; start one with `vectormill scheduler`."
    if around.is_redis_away:
        return "The scheduler cannot reach Redis; the job continues automatically when Redis is back."
    if around.is_redis_full:
        return (
            "Redis responds but accepts no messages, most likely because its memory is full; raise maxmemory or "
            "remove other data. The job then continues automatically."
        )
    if mine is not None and mine.oldest_queued_seconds > UNCLAIMED_SECONDS:
        return (
            "Its chunks are queued in Redis, but no worker takes them; the workers' logs show whether they can reach "
            "Redis. A worker that cannot is restarted within a minute."
        )
    if job.id in around.setbacks:
        return f"Its chunks are waiting to be retried after an error: {around.setbacks[job.id]}"
    if mine is None and job.priority != INTERACTIVE_PRIORITY:
        return _tell_busy(job, serving, around.in_hand)
    return None


def explain_absence(spec: EncodingSpec, workers: Sequence[ServingWorker]) -> str | None:
    """Explain why none of the live workers can encode with this spec; None if one can."""
    serving = [worker for worker in workers if worker.model == spec.model]
    fitting = [worker for worker in serving if worker.has_model_of(spec)]
    if not serving:
        others = sorted({worker.model for worker in workers})
        served = f" Live workers serve {_enumerate(others)}." if others else ""
        return f"No live worker serves {spec.model}; start one with `vectormill worker --model {spec.model}`.{served}"
    if not fitting:
        held = sorted({_describe(worker.revision, worker.pooling) for worker in serving})
        asked = _describe(spec.revision, spec.model_pooling)
        return (
            f"No live worker serves {spec.model} with {asked}, as the job requires; live workers have "
            f"{_enumerate(held)}. Start one with that model (`vectormill worker --model {spec.model}`), or cancel the "
            "job and submit it again."
        )
    if not any(worker.is_ready for worker in fitting):
        return _tell_not_ready(spec.model, fitting)
    return None


def explain_load_failure(spec: EncodingSpec, workers: Sequence[ServingWorker], seconds: float) -> str | None:
    """Return why every live worker for this spec has failed to load its model for so many seconds.

    Return None if one of them has not failed for that long, or if there is no such worker.
    """
    fitting = [worker for worker in workers if worker.model == spec.model and worker.has_model_of(spec)]
    if not fitting or any(worker.slots or worker.seconds_since_start < seconds for worker in fitting):
        return None
    return _tell_not_ready(spec.model, fitting)


def _describe(revision: str | None, pooling: str | None) -> str:
    parts = (("revision", revision), ("pooling", pooling))
    return " and ".join(f"{name} {value}" for name, value in parts if value is not None)


def _tell_not_ready(model: str, workers: Sequence[ServingWorker]) -> str:
    states = sorted(
        f"{worker.name} is {worker.state}" + (f" ({worker.state_reason})" if worker.state_reason else "")
        for worker in workers
    )
    return f"No worker for {model} is ready: {_enumerate(states)}."


def _tell_busy(job: Job, serving: Sequence[ServingWorker], in_hand: Iterable[DispatchedChunks]) -> str | None:
    model = job.spec.model
    others = [
        chunks for chunks in in_hand if chunks.model == model and chunks.priority != INTERACTIVE_PRIORITY
    ]
    num_chunks = sum(chunks.num_queued + chunks.num_leased for chunks in others)
    has_slots = num_chunks < sum(worker.slots for worker in serving)
    bounds = [worker.max_tokens_in_flight for worker in serving]
    most_tokens = math.inf if None in bounds else sum(bound or 0 for bound in bounds)
    if has_slots and sum(chunks.num_tokens for chunks in others) < most_tokens:
        return None  # the dispatcher uses the free capacity within a second
    num_urgent = sum(chunks.priority < job.priority for chunks in others)
    jobs = "another job" if len(others) == 1 else f"{len(others)} other jobs"
    if num_urgent == len(others):
        return f"All workers for {model} are busy with {jobs} of higher priority."
    urgent = f", {num_urgent} of them of higher priority" if num_urgent else ""
    return f"All workers for {model} are busy with {jobs}{urgent}; this job will get its turn."


def _enumerate(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"


# Each report is a few kilobytes of JSON, so only those of workers for the models in question are parsed, and
# only once.
LIST_SERVING_WORKERS = text(f"""
    SELECT name, model, slots, told.revision, told.pooling, told.state, told.state_reason,
           max_tokens_in_flight, extract(epoch FROM now() - started_at)::float8 AS seconds_since_start,
           told.aliases
      FROM vectormill.workers
     CROSS JOIN LATERAL jsonb_to_record(CASE WHEN model = ANY(CAST(:models AS text[])) THEN report ELSE '{{}}' END)
                     AS told (revision text, pooling text, state text, state_reason text, aliases text[])
     WHERE {IS_ALIVE} ORDER BY name LIMIT 10000
""")

# Each state has its own SELECT, so that each reads its partial index; see LIST_ROOMS. There are as many rows
# as jobs with dispatched chunks.
LIST_IN_HAND = text("""
    SELECT held.job_id, job.model, job.priority, held.num_queued, held.num_leased, held.oldest_queued_seconds,
           held.num_tokens
      FROM (SELECT job_id, count(queued_at)::int AS num_queued, count(lease_until)::int AS num_leased,
                   coalesce(extract(epoch FROM now() - min(queued_at)), 0)::float8 AS oldest_queued_seconds,
                   sum(estimated_tokens)::bigint AS num_tokens
              FROM (SELECT job_id, queued_at, CAST(NULL AS timestamptz) AS lease_until, estimated_tokens
                      FROM vectormill.chunks WHERE state = 'queued'
                     UNION ALL
                    SELECT job_id, NULL, lease_until, estimated_tokens
                      FROM vectormill.chunks WHERE state = 'leased' AND lease_until > now()) AS chunks
             GROUP BY job_id) AS held
     CROSS JOIN LATERAL (SELECT model, priority FROM vectormill.jobs WHERE id = held.job_id LIMIT 1) AS job
     WHERE job.model = ANY(CAST(:models AS text[]))
""")

LIST_HELD_JOBS = text("""
    SELECT waiting.job_id FROM unnest(CAST(:job_ids AS uuid[])) AS waiting (job_id)
     WHERE EXISTS (SELECT 1 FROM vectormill.chunks
                    WHERE job_id = waiting.job_id AND state = 'leased' AND lease_until > now())
""")

# CASE guarantees the order: for a job with a chunk that could be dispatched now, nearly always its first,
# nothing else is read. As a join, 20,000 waiting chunks cost 17 ms. ORDER BY makes the planner use the
# partial index; with EXISTS it read the whole table.
LIST_SETBACKS = text("""
    SELECT waiting.job_id,
           CASE WHEN (SELECT id FROM vectormill.chunks
                       WHERE job_id = waiting.job_id AND state = 'pending' AND available_at <= now()
                       ORDER BY seq LIMIT 1) IS NULL
                THEN (SELECT error FROM vectormill.chunks
                       WHERE job_id = waiting.job_id AND state = 'pending' AND error IS NOT NULL
                       ORDER BY seq LIMIT 1) END AS error
      FROM unnest(CAST(:job_ids AS uuid[])) AS waiting (job_id)
""")


# Thousands of chunks in flight take Postgres some 60 ms to list, and each waiting client asks twice a second.
LARGE_ANSWER: Final = 500
KEPT_SECONDS: Final = 1.0


_Row = TypeVar("_Row")


class RecentAnswers:
    """Large answers of the last second, by database, statement and models, which requests of one process share.

    Thread-safe: at worst several threads read the same.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[object, ...], tuple[float, list[Any]]] = {}

    def read(
        self, connection: Connection, statement: TextClause, values: dict[str, Any], make: Callable[..., _Row]
    ) -> list[_Row]:
        """Return what `make` makes of each row of the statement, now or at most KEPT_SECONDS ago."""
        key = connection.engine.url, statement.text, *values["models"]
        now = self._clock()
        until, rows = self._kept.get(key, (now, []))
        if now < until:
            return rows
        rows = [make(*row) for row in connection.execute(statement, values)]
        kept = {each: answer for each, answer in self._kept.items() if now < answer[0]}
        self._kept = kept | {key: (now + KEPT_SECONDS, rows)} if len(rows) >= LARGE_ANSWER else kept
        return rows


RECENT: Final = RecentAnswers()


def explain_waits(connection: Connection, jobs: Sequence[Job]) -> dict[UUID, str]:
    """Return by job id the reason why each job makes no progress; jobs that do, or have ended, are left out."""
    unread = [job for job in jobs if job.is_left_to_indexer]
    unread_reasons: dict[UUID, str | None] = {}
    if unread and INDEXER not in list_signs_of_life(connection):
        reason = "There is no live indexer, which reads the objects of this job; start one with `vectormill indexer`."
        unread_reasons = {job.id: reason for job in unread}
    else:
        for job in unread:
            if job.input_error is not None:
                reason = f"Its objects could not be read and are tried again: {job.input_error}"
                unread_reasons[job.id] = reason
    waiting = [job for job in jobs if job.state in STEERABLE_JOB_STATES]
    around = load_surroundings(connection, [job for job in waiting if job.state != PAUSED])
    reasons = unread_reasons | {job.id: explain_wait(job, around) for job in waiting}
    return {job_id: reason for job_id, reason in reasons.items() if reason is not None}


def make_job_bodies(connection: Connection, jobs: Sequence[Job]) -> list[JobBody]:
    """Return jobs as the API returns them, in the given order, each with the reason why it waits.

    Workers and queues are read only if one of the jobs is open.
    """
    reasons = explain_waits(connection, jobs)
    return [describe_job(job, reasons.get(job.id)) for job in jobs]


def make_job_body(connection: Connection, job: Job) -> JobBody:
    """Return a job as the API returns it, with the reason why it waits, if it does."""
    return describe_job(job, explain_waits(connection, [job]).get(job.id))


def list_serving_workers(connection: Connection, model: str) -> list[ServingWorker]:
    """List the live workers, with the reports of those that serve this model."""
    return [ServingWorker(*row) for row in connection.execute(LIST_SERVING_WORKERS, {"models": [model]})]


def refuse_unserved(connection: Connection, spec: EncodingSpec) -> None:
    """Raise ModelNotServed if there are live workers of the model, and all of them have failed to load it."""
    reason = explain_load_failure(spec, list_serving_workers(connection, spec.model), 0.0)
    if reason is not None:
        raise ModelNotServed(
            f"{reason} Nothing was stored. Mend the cause; or submit with wait_for_worker (--wait-for-worker), and the "
            "job waits until a worker has loaded the model."
        )


def explain_query_wait(connection: Connection, spec: EncodingSpec) -> str | None:
    """Explain why no worker answers a query with this spec, from what Postgres knows.

    Return None if no reason is found.
    """
    if (absence := explain_absence(spec, list_serving_workers(connection, spec.model))) is not None:
        return absence
    if REDIS_AWAY in list_signs_of_life(connection):
        return "The scheduler cannot reach Redis; `vectormill doctor` where it runs says why."
    return None


def load_surroundings(connection: Connection, jobs: Sequence[Job]) -> ClusterState:
    """Load the facts that explain why these queued or running jobs wait.

    Nothing is read if there are no jobs, and little for jobs that make progress, because clients poll these
    often.
    """
    nothing = ClusterState(
        [], [], is_scheduler_alive=True, is_redis_away=False, is_redis_full=False, setbacks={}
    )
    if not jobs:
        return nothing
    models = {"models": sorted({job.spec.model for job in jobs})}
    workers = RECENT.read(connection, LIST_SERVING_WORKERS, models, ServingWorker)
    held = set(connection.execute(LIST_HELD_JOBS, {"job_ids": [job.id for job in jobs]}).scalars())
    if held.issuperset(job.id for job in jobs):
        own = [DispatchedChunks(job.id, job.spec.model, job.priority, 0, 1, 0.0) for job in jobs]
        return replace(nothing, workers=workers, in_hand=own)
    in_hand = RECENT.read(connection, LIST_IN_HAND, models, DispatchedChunks)
    seen = replace(nothing, workers=workers, in_hand=in_hand)
    dispatched = {chunks.job_id for chunks in in_hand}
    idle = {"job_ids": [job.id for job in jobs if job.id not in dispatched]}
    signs = list_signs_of_life(connection)
    return replace(
        seen,
        is_scheduler_alive=SCHEDULER in signs,
        is_redis_away=REDIS_AWAY in signs,
        is_redis_full=REDIS_FULL in signs,
        setbacks={row.job_id: row.error for row in connection.execute(LIST_SETBACKS, idle) if row.error},
    )


# The chunks are failed in the transaction that claims them.
CLAIM_SECONDS: Final = 60.0

# Nearly always no model is failing, and then no other statement is run.
LIST_FAILING_MODELS = text(f"SELECT DISTINCT model FROM vectormill.workers WHERE {IS_ALIVE} AND slots = 0")

LIST_STUCK_JOBS = text(f"""
    SELECT id, spec FROM vectormill.jobs
     WHERE model = ANY(CAST(:models AS text[])) AND state IN {DISPATCHED_JOB_STATES}
       AND updated_at <= now() - make_interval(secs => :seconds)
     ORDER BY model, priority, seq LIMIT 10000
""")


def find_stuck_jobs(connection: Connection, seconds: float) -> dict[UUID, str]:
    """Return the reason for each job whose model no live worker has been able to load for so many seconds."""
    models = list(connection.execute(LIST_FAILING_MODELS).scalars())
    if not models:
        return {}
    workers = [ServingWorker(*row) for row in connection.execute(LIST_SERVING_WORKERS, {"models": models})]
    jobs = connection.execute(LIST_STUCK_JOBS, {"models": models, "seconds": seconds})
    reasons = {
        row.id: explain_load_failure(EncodingSpec.from_json(row.spec), workers, seconds) for row in jobs
    }
    return {job_id: reason for job_id, reason in reasons.items() if reason is not None}


# A dispatched chunk is left to a later round: a worker has it, or it becomes pending again.
LIST_WAITING_CHUNKS = text("""
    SELECT chunks.id, jobs.model
      FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = chunks.job_id
     WHERE job_id = :job_id AND chunks.state = 'pending' AND available_at <= now()
     ORDER BY chunks.seq LIMIT :limit
""")


def fail_waiting_chunks(connection: Connection, job_id: UUID, reason: str, limit: int) -> int:
    """Fail at most `limit` pending chunks of a job, each item with the given reason, as a worker would.

    Return the number of chunks. The transaction that fails the last open chunk ends the job.
    """
    num_failed = 0
    for row in connection.execute(LIST_WAITING_CHUNKS, {"job_id": job_id, "limit": limit}).all():
        claimed = claim_chunk(connection, row.id, "the pruner", row.model, CLAIM_SECONDS)
        if claimed is not None:
            items: Sequence[Item] = [Item("", b"")] * claimed.claim.num_items
            if claimed.payload is not None:
                items = replace(read_known(claimed.payload), places=claimed.places)
            fail_chunk(connection, claimed.claim, items, ItemFailure(MODEL_NOT_LOADED, reason), None)
            num_failed += 1
    return num_failed
