"""One table has each change of the state of a chunk; the counters of its job move in the statements made from it.

Only this module writes states of chunks and counters of jobs. A statement that changes chunks notes in the same
transaction, from the rows that it changed, by how much the counters of their job differ (`job_increments`), so that a
counter moves only together with what it counts. `count_chunk` and `add_up_job` add such notes to the row of the job, if
nobody else holds it; otherwise the next one that counts the job does, or the scheduler. So commits of one job do not
wait for each other. A job cannot end before: what is only noted as ended is still one of its open chunks.

Chunks are locked before the row of their job, and whoever holds that waits for no chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, TextClause, text

from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import LeaseLost
from vectormill.domain.states import States
from vectormill.jobs.chunk import (
    CANCELLED,
    DONE,
    FAILED,
    IS_LEASED,
    LEASED,
    OPEN_CHUNK_STATES,
    PENDING,
    QUEUED,
    SPLIT,
    UNCLAIMED_CHUNK_STATES,
    ChunkOutcome,
    Claim,
)
from vectormill.jobs.job import DISPATCHED_JOB_STATES, FINISHED_JOB_STATES, RECEIVED_JOB_STATES

_FREE: Final = "lease_owner = NULL, lease_until = NULL"
_AGAIN: Final = "attempt = 0, lost = 0, lapsed = 0, available_at = now()"
# A chunk names each period between two proofs of a worker that has computed one of its results (decision 0112).
_KEEP_PERIOD: Final = (
    "proof_id = NULL, earlier_proofs = CASE WHEN chunk.proof_id IS NULL THEN chunk.earlier_proofs "
    "ELSE array_append(chunk.earlier_proofs, chunk.proof_id) END"
)
# A commit or a failure of a faulty chunk has replaced or removed all of its vectors; a cancellation leaves them.
_REPLACED: Final = """proof_id = CAST(:proof_id AS bigint), is_faulty = NULL,
       earlier_proofs = CASE WHEN is_faulty THEN NULL ELSE earlier_proofs END"""
# `is_suspect` of a faulty chunk is false instead of NULL if some of the items that it encodes again had no vector.
_DOUBTED: Final = "is_suspect = is_suspect OR is_faulty"
# The items to be encoded: those that a retry or a recomputation asks for, and in an open chunk also those that wait.
# NULL means all items.
_WANT_MORE: Final = f"""only_items = CASE
           WHEN found.state IN {OPEN_CHUNK_STATES} AND chunk.only_items IS NULL THEN NULL
           ELSE (SELECT array_agg(DISTINCT item ORDER BY item)
                   FROM unnest(found.items || CASE WHEN found.state IN {OPEN_CHUNK_STATES}
                                                   THEN chunk.only_items END) AS wanted (item)) END"""


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of a chunk's state when `event` happens: from one of the states `leaves` to `enters`.

    `columns` are the other assignments of its UPDATE, which may read the columns of `found` (see `_change`).
    `is_retried` is the SQL condition on which the chunk counts among the retried chunks of its job.
    """

    event: str
    leaves: States
    enters: str
    columns: str
    is_retried: str = "false"

    @property
    def is_due(self) -> str:
        """Return the condition that a chunk is in one of the states; a single one lets a partial index serve."""
        states = tuple(self.leaves)
        return f"chunk.state = '{states[0]}'" if len(states) == 1 else f"chunk.state IN {self.leaves}"


DISPATCH: Final = Transition(
    "The dispatcher has capacity for it",
    States((PENDING,)),
    QUEUED,
    "queued_at = now(), dispatch_seq = dispatch_seq + 1",
)
# A chunk may also be claimed from `pending`, because a late message of an earlier dispatch is as good as a new one, and
# from `leased` if the lease has lapsed.
CLAIM: Final = Transition(
    "A worker claims it",
    OPEN_CHUNK_STATES,
    LEASED,
    """fence = fence + 1, is_alone = false,
       attempt = attempt + CASE found.state WHEN 'leased' THEN 0 ELSE 1 END,
       lapsed = lapsed + CASE found.state WHEN 'leased' THEN 1 ELSE 0 END,
       lease_owner = :owner, lease_until = now() + make_interval(secs => :lease_seconds)""",
    is_retried="left_state = 'leased'",
)
RECALL: Final = Transition(
    "Its message is lost, nobody has claimed it in time, or its job is paused",
    States((QUEUED,)),
    PENDING,
    "available_at = now()",
)
RELEASE: Final = Transition(
    "Its worker hands it back, because of an error or because it stops",
    States((LEASED,)),
    PENDING,
    f"""{_FREE}, error = :reason,
       attempt = attempt - CASE WHEN :is_counted THEN 0 ELSE 1 END,
       lost = lost + CASE WHEN :is_lost THEN 1 ELSE 0 END,
       lapsed = lapsed + CASE WHEN :is_lapsed THEN 1 ELSE 0 END,
       available_at = now() + make_interval(secs => :delay_seconds)""",
    is_retried=":is_counted OR :is_lost OR :is_lapsed",
)
# A lapse says nothing about the texts: the database was away, a lock was waited for, or a host was cut off. So it
# counts neither as an attempt nor as a loss, and the whole chunk runs again, after a pause that doubles up to a minute.
LAPSE: Final = Transition(
    "Its lease expires",
    States((LEASED,)),
    PENDING,
    f"""{_FREE}, lapsed = lapsed + 1, attempt = greatest(attempt - 1, 0),
       error = 'the worker ' || coalesce(lease_owner, '?') || ' stopped renewing its lease',
       available_at = now() + make_interval(secs => least(60, power(2, least(lapsed, 6)) - 1))""",
    is_retried="true",
)
# If one chunk was encoded alone, it is to blame, and others that waited for it are not. If several were encoded
# together, any of them may be: they become suspects, and are encoded alone next time.
ORPHAN: Final = Transition(
    "The process that held it has ended",
    States((LEASED,)),
    PENDING,
    f"""{_FREE}, available_at = now(), error = :reason, attempt = greatest(attempt - 1, 0),
       lost = CASE WHEN :is_evidence AND found.was_alone THEN lost + 1
                   WHEN :is_evidence AND NOT found.is_known THEN greatest(lost, 1)
                   ELSE lost END,
       lapsed = lapsed + CASE WHEN :is_evidence THEN 0 ELSE 1 END""",
    is_retried="true",
)
COMMIT: Final = Transition(
    "Its worker commits results",
    States((LEASED,)),
    DONE,
    f"{_FREE}, error = NULL, only_items = NULL, {_REPLACED}",
)
REFUSE: Final = Transition(
    "Its worker can encode none of its items, or no worker could load their model for too long",
    States((LEASED,)),
    FAILED,
    f"{_FREE}, error = NULL, only_items = NULL, {_REPLACED}",
)
ABANDON: Final = Transition(
    "Its worker learns that the job is being cancelled",
    States((LEASED,)),
    CANCELLED,
    f"{_FREE}, error = NULL, {_DOUBTED}",
)
DIVIDE: Final = Transition(
    "Its worker replaces it by two halves, because one of its texts may end workers",
    States((LEASED,)),
    SPLIT,
    f"{_FREE}, error = :reason",
)
CANCEL: Final = Transition(
    "Its job is cancelled while no worker has it", UNCLAIMED_CHUNK_STATES, CANCELLED, _DOUBTED
)
# Its message or its worker's commit, if there are any, come to nothing: the state is another one.
RETRY: Final = Transition(
    "A client retries its failed items",
    States((*OPEN_CHUNK_STATES, DONE, FAILED)),
    PENDING,
    f"{_FREE}, {_AGAIN}, error = NULL, {_KEEP_PERIOD}, is_suspect = is_suspect AND is_faulty IS NULL, {_WANT_MORE}",
)
RECOMPUTE: Final = Transition(
    "A proof fails that one of its vectors or item errors needs",
    States((*OPEN_CHUNK_STATES, DONE, FAILED)),
    PENDING,
    f"""{_FREE}, {_AGAIN}, error = :reason, {_KEEP_PERIOD}, is_faulty = true, {_WANT_MORE},
       is_suspect = CASE WHEN found.num_done < cardinality(found.items) THEN false END""",
    is_retried="true",
)
TRANSITIONS: Final = (
    DISPATCH, CLAIM, RECALL, RELEASE, LAPSE, ORPHAN, COMMIT, REFUSE, ABANDON, DIVIDE, CANCEL, RETRY, RECOMPUTE,
)  # fmt: skip


def _change(
    step: Transition,
    which: str,
    told: str = "SELECT id, job_id FROM moved",
    *,
    before: str = "",
    lock: str = "FOR NO KEY UPDATE OF chunk SKIP LOCKED",
    beside: Mapping[str, str] | None = None,
    noted: Mapping[str, str] | None = None,
) -> TextClause:
    """Return the statement that carries out a step for the chunks which `which` selects, and notes what it changes.

    `which` follows on SELECT and begins at FROM; `before` are common table expressions that it reads, and `beside`
    further columns that it selects. `told` reads the changed chunks from `moved`, with their former `left_state` and
    what is `beside`, and `noted` has the expressions of further counters. A locked chunk is left out, because it is
    being claimed, renewed, committed or handed back, and that is more recent.
    """
    sums = dict(noted or {})
    if step.is_retried != "false":
        sums["num_retried_chunks"] = f"count(*) FILTER (WHERE {step.is_retried})"
    if not {*step.leaves, step.enters}.issubset(OPEN_CHUNK_STATES):
        were_open = f"count(*) FILTER (WHERE left_state IN {OPEN_CHUNK_STATES})"
        sums["num_chunks"] = f"{were_open} - count(*)" if step.enters in OPEN_CHUNK_STATES else were_open
    noting = ""
    if sums:
        noting = f""", noted AS (
        INSERT INTO vectormill.job_increments (job_id, {", ".join(sums)})
        SELECT job_id, {", ".join(sums.values())} FROM moved GROUP BY job_id
        HAVING {" OR ".join(f"{total} <> 0" for total in sums.values())}
    )"""
    beside = beside or {}
    return text(f"""
    WITH {before}found AS MATERIALIZED (
        SELECT chunk.id, chunk.state{"".join(f", {value} AS {name}" for name, value in beside.items())}
        {which} {lock}
    ), moved AS (
        UPDATE vectormill.chunks AS chunk SET state = '{step.enters}', {step.columns}
          FROM found WHERE chunk.id = found.id
        RETURNING chunk.*, found.state AS left_state{"".join(f", found.{name}" for name in beside)}
    ){noting}
    {told}
""")


MARK_QUEUED: Final = _change(
    DISPATCH,
    f"""
          FROM unnest(CAST(:job_ids AS uuid[]), CAST(:counts AS int[])) AS share (job_id, num_chunks)
          JOIN vectormill.jobs AS job ON job.id = share.job_id AND job.state = 'running'
         CROSS JOIN LATERAL (
               SELECT id, state FROM vectormill.chunks AS chunk
                WHERE job_id = share.job_id AND {DISPATCH.is_due} AND available_at <= now()
                ORDER BY seq LIMIT share.num_chunks
                  FOR NO KEY UPDATE SKIP LOCKED) AS chunk""",
    """SELECT moved.id, dispatch_seq, job_id, moved.seq, moved.num_items, job.model, job.priority, estimated_tokens
      FROM moved JOIN vectormill.jobs AS job ON job.id = moved.job_id""",
    lock="",
)

# No message ends the pause of a chunk after a failed attempt. The claim and its texts come from one statement, so this
# takes one round trip and no explicit transaction.
CLAIM_CHUNK: Final = _change(
    CLAIM,
    f"""
          FROM vectormill.chunks AS chunk JOIN vectormill.jobs AS job ON job.id = chunk.job_id
         WHERE chunk.id = :chunk_id AND job.state IN {DISPATCHED_JOB_STATES} AND job.model = :model
           AND CASE WHEN chunk.{IS_LEASED} THEN lease_until < now()
                    ELSE chunk.state IN {UNCLAIMED_CHUNK_STATES} AND available_at <= now() END""",
    """SELECT claimed.id, claimed.fence, claimed.attempt, claimed.lost, claimed.lapsed, claimed.num_items,
           claimed.first_item, claimed.only_items, claimed.is_faulty, claimed.dispatch_seq,
           claimed.estimated_tokens AS num_tokens,
           CASE left_state WHEN 'queued' THEN extract(epoch FROM now() - queued_at)::float8 END AS dispatch_seconds,
           job.id AS job_id, coalesce(job.place, job.seq) AS job_seq, job.priority, job.spec, job.generation_id,
           job.traceparent, payload.items, payload.places,
           (SELECT keep_text FROM vectormill.collections WHERE id = generation.collection_id) AS keep_text,
           generation.fingerprint AS generation_fingerprint,
           claimed.only_items IS NULL
               AND generation.report #>> '{fill,job}' = CAST(claimed.job_id AS text) AS is_fill,
           output.url AS output_url, output.table_schema AS output_schema
      FROM moved AS claimed JOIN vectormill.jobs AS job ON job.id = claimed.job_id
                   LEFT JOIN LATERAL vectormill.payload_of(claimed.id) AS payload ON true
                   LEFT JOIN vectormill.job_outputs AS output ON output.id = claimed.job_id
                   LEFT JOIN vectormill.generations AS generation ON generation.id = job.generation_id""",
)

_BY_FENCE: Final = f"""
          FROM vectormill.chunks AS chunk WHERE chunk.id = :chunk_id AND chunk.fence = :fence AND chunk.{IS_LEASED}"""
RELEASE_CHUNK: Final = _change(RELEASE, _BY_FENCE, lock="FOR NO KEY UPDATE")


def _end(step: Transition) -> TextClause:
    """Return the statement by which a worker ends its chunk, under the fence of its claim. COUNT_CHUNK counts it.

    It comes first in a transaction: a worker that lost its lease stops there, before it has written anything.
    """
    return text(f"""
    UPDATE vectormill.chunks SET state = '{step.enters}', {step.columns}
     WHERE id = :chunk_id AND fence = :fence AND {IS_LEASED}
    RETURNING id
""")


COMMIT_CHUNK: Final = _end(COMMIT)
REFUSE_CHUNK: Final = _end(REFUSE)
ABANDON_CHUNK: Final = _end(ABANDON)
DIVIDE_CHUNK: Final = _end(DIVIDE)

RESCUE_EXPIRED: Final = _change(
    LAPSE,
    f"FROM vectormill.chunks AS chunk WHERE {LAPSE.is_due} AND lease_until < now() ORDER BY lease_until LIMIT 1000",
)
RELEASE_ORPHANED: Final = _change(
    ORPHAN,
    f"""
          FROM (SELECT *, bool_or(is_alone) OVER () AS is_known
                  FROM (SELECT id, state, is_alone FROM vectormill.chunks AS chunk
                         WHERE {ORPHAN.is_due} AND right(lease_owner, 8) = :tag
                           FOR NO KEY UPDATE SKIP LOCKED) AS held) AS chunk""",
    lock="",
    beside={"was_alone": "chunk.is_alone", "is_known": "chunk.is_known"},
)

_QUEUED: Final = f"FROM vectormill.chunks AS chunk WHERE {RECALL.is_due}"
RECALL_CHUNKS: Final = _change(RECALL, f"{_QUEUED} AND job_id = :job_id")
RESCUE_UNCLAIMED: Final = _change(
    RECALL,
    f"{_QUEUED} AND queued_at < now() - make_interval(secs => :timeout) ORDER BY queued_at LIMIT :limit",
)
# A dispatch that began before a pause may end after it. Its message can claim nothing, so the chunk would look as if
# the message had been lost.
RECALL_PAUSED: Final = _change(
    RECALL,
    f"{_QUEUED} AND EXISTS (SELECT FROM vectormill.jobs WHERE id = chunk.job_id AND state = 'paused')",
)
# The dispatch number distinguishes this dispatch from a later one of the same chunk.
RECALL_DISPATCHES: Final = _change(
    RECALL,
    f"""
          FROM unnest(CAST(:chunk_ids AS bigint[]), CAST(:dispatch_seqs AS int[])) AS absent (id, dispatch_seq)
          JOIN vectormill.chunks AS chunk ON chunk.id = absent.id AND chunk.dispatch_seq = absent.dispatch_seq
         WHERE {RECALL.is_due}""",
)

_CANCELLED: Final = f"FROM vectormill.chunks AS chunk WHERE {CANCEL.is_due}"
CANCEL_WAITING_CHUNKS: Final = _change(CANCEL, f"{_CANCELLED} AND job_id = :job_id")
# Chunks that became pending again while their job was being cancelled.
END_CANCELLING: Final = _change(
    CANCEL,
    f"""
          FROM vectormill.jobs AS job JOIN vectormill.chunks AS chunk ON chunk.job_id = job.id
         WHERE job.state = 'cancelling' AND {CANCEL.is_due}""",
    "SELECT DISTINCT job_id FROM moved",
)
# The chunks are locked before their job, in one order.
LOCK_FAILED_CHUNKS: Final = text("""
    SELECT id FROM vectormill.chunks AS chunk
     WHERE id IN (SELECT chunk_id FROM vectormill.item_errors WHERE job_id = :job_id)
     ORDER BY id FOR NO KEY UPDATE
""")
RETRY_FAILED_ITEMS: Final = _change(
    RETRY,
    f"FROM failed JOIN vectormill.chunks AS chunk ON chunk.id = failed.chunk_id WHERE {RETRY.is_due}",
    before="""removed AS (
        DELETE FROM vectormill.item_errors WHERE job_id = :job_id AND chunk_id = ANY(CAST(:chunk_ids AS bigint[]))
        RETURNING chunk_id, item
    ), failed AS (
        SELECT chunk_id, array_agg(CAST(item - first_item AS integer)) AS items
          FROM removed JOIN vectormill.chunks AS whole ON whole.id = chunk_id GROUP BY chunk_id
    ), """,
    lock="FOR NO KEY UPDATE OF chunk",
    beside={"items": "failed.items"},
    noted={"num_failed": "-sum(cardinality(items))"},
)
# `num_ended` is the number of these items that were counted as done or failed until now.
REOPEN_CHUNK: Final = _change(
    RECOMPUTE,
    f"FROM vectormill.chunks AS chunk WHERE id = :chunk_id AND {RECOMPUTE.is_due}",
    before="""removed AS (
        DELETE FROM vectormill.item_errors WHERE job_id = :job_id
           AND item IN (SELECT :first_item + unnest(CAST(:items AS bigint[]))) RETURNING item
    ), """,
    lock="FOR NO KEY UPDATE",
    beside={
        "items": "CAST(:items AS integer[])",
        "num_failed": "(SELECT count(*) FROM removed)",
        "num_done": "CAST(:num_ended AS bigint) - (SELECT count(*) FROM removed)",
    },
    noted={name: f"-sum({name})" for name in ("num_done", "num_failed")},
)


# A split replaces one chunk by two. The job's row is locked from here on, so nobody else uses the new sequence numbers.
COUNT_CHILDREN: Final = text("""
    UPDATE vectormill.jobs
       SET num_chunks = num_chunks + 2, num_open_chunks = num_open_chunks + 1,
           num_retried_chunks = num_retried_chunks + 1, updated_at = now()
     WHERE id = :job_id
    RETURNING num_chunks
""")
INSERT_CHILD: Final = text("""
    WITH child AS (
        INSERT INTO vectormill.chunks
               (job_id, seq, state, first_item, num_items, only_items, parent_id, lost, lapsed, estimated_tokens,
                earlier_proofs, is_faulty, is_suspect)
        SELECT :job_id, :seq, 'pending', :first_item, :num_items, CAST(:only_items AS integer[]), id,
               :lost, :lapsed, :estimated_tokens, earlier_proofs, is_faulty, is_suspect
          FROM vectormill.chunks WHERE id = :parent_id
        RETURNING id
    ), payload AS (
        INSERT INTO vectormill.chunk_payloads (chunk_id, items, places)
        SELECT id, :items, CAST(:places AS bigint[]) FROM child
    ), moved_errors AS (
        UPDATE vectormill.item_errors SET chunk_id = (SELECT id FROM child)
         WHERE job_id = :job_id AND item >= :first_item AND item < :end_item
    )
    INSERT INTO vectormill.chunk_vectors (chunk_id, vectors, item_tokens)
    SELECT child.id, substring(vectors FROM CAST(:first_byte AS integer) FOR CAST(:num_bytes AS integer)),
           substring(item_tokens FROM CAST(:first_count AS integer) FOR CAST(:count_bytes AS integer))
      FROM child, vectormill.chunk_vectors WHERE chunk_vectors.chunk_id = :parent_id
""")

INSERT_CHUNK: Final = text("""
    WITH chunk AS (
        INSERT INTO vectormill.chunks (job_id, seq, state, first_item, num_items, estimated_tokens)
        VALUES (:job_id, :seq, 'pending', :first_item, :num_items, :estimated_tokens) RETURNING id
    )
    INSERT INTO vectormill.chunk_payloads (chunk_id, items, places)
    SELECT id, :items, CAST(:places AS bigint[]) FROM chunk
""")
# NOTIFY is a hint that wakes the dispatcher. It takes a global lock at commit, so it is sent once for each job, and
# never in the transaction of a chunk.
WAKE_DISPATCHER: Final = text("SELECT pg_notify('vectormill_jobs', '')")
QUEUE_JOB: Final = text("""
    UPDATE vectormill.jobs
       SET state = 'queued', spec = CAST(:spec AS jsonb), generation_id = :generation_id,
           content_hash = coalesce(content_hash, :content_hash),
           num_items = :num_items, num_chunks = :num_chunks, num_open_chunks = :num_chunks, updated_at = now()
     WHERE id = :id AND state = 'uploading'
    RETURNING id
""")

# A faulty chunk was done before, if no item of it had failed. Chunks with failed items are always copied, since a
# client may retry the twin once its generation is live.
_IS_COPIED: Final = """
    chunks.state <> 'split'
    AND (CAST(:with_done AS boolean) OR chunks.state <> 'done' AND (chunks.is_faulty IS NULL OR NOT chunks.is_suspect)
         OR EXISTS (SELECT 1 FROM vectormill.item_errors AS failed
                     WHERE failed.job_id = :job_id AND failed.chunk_id = chunks.id))
"""
INSERT_TWIN: Final = text(f"""
    INSERT INTO vectormill.jobs
           (id, state, model, spec, generation_id, priority, metadata, content_hash, num_items, num_chunks,
            num_open_chunks, twin_of, forget_at, place)
    SELECT :twin_id, 'queued', :model, CAST(:spec AS jsonb), :generation_id, job.priority, job.metadata,
           job.content_hash, chunks.num_items, chunks.num_chunks, chunks.num_chunks, job.id, job.forget_at,
           coalesce(job.place, job.seq)
      FROM vectormill.jobs AS job,
           (SELECT coalesce(sum(num_items), 0) AS num_items, count(*) AS num_chunks
              FROM vectormill.chunks WHERE job_id = :job_id AND {_IS_COPIED}) AS chunks
     WHERE job.id = :job_id AND chunks.num_chunks > 0
    RETURNING id
""")
# Payloads are copied in compressed form; no text is decoded.
COPY_CHUNKS: Final = text(f"""
    WITH original AS (
        SELECT chunks.id, seq, first_item, chunks.num_items, estimated_tokens, payload.items, payload.places
          FROM vectormill.chunks JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = chunks.id
         WHERE chunks.job_id = :job_id AND {_IS_COPIED}
    ), copied AS (
        INSERT INTO vectormill.chunks (job_id, seq, state, first_item, num_items, estimated_tokens)
        SELECT :twin_id, seq, 'pending', first_item, num_items, estimated_tokens FROM original
        RETURNING id, seq
    )
    INSERT INTO vectormill.chunk_payloads (chunk_id, items, places)
    SELECT copied.id, original.items, original.places FROM copied JOIN original ON original.seq = copied.seq
""")

# With at most this many open chunks every commit tries to count its job at once. Of more, one chunk in 64 does: so
# progress is seen without the scheduler, too.
_NEAR_END_CHUNKS: Final = 256
_CHUNKS_PER_TURN: Final = 64

_SUMMED: Final = (
    "num_chunks", "num_done", "num_failed", "num_tokens", "num_computed_tokens", "num_truncated", "num_passages",
    "num_reused", "num_repeated", "num_retried_chunks",
)  # fmt: skip

# The seconds between two marks of a job's pace: its recent rate is that of the last one to two times as long.
_PACE_SECONDS: Final = 120
_SECONDS: Final = "(extract(epoch FROM now() - jobs.started_at)::float8 - jobs.idle_seconds)"
_ENDED: Final = "(jobs.num_done + jobs.num_failed + sums.num_done + sums.num_failed)::float8"

# A row that somebody holds is skipped. The sums are joined and not looked up in SET: if another transaction has changed
# the row since the statement began, only SET is evaluated again, with the row as it is now. The moment of the last
# progress, from which a job ages, stays while chunks fail without it. An ended job whose chunks were reopened is open
# again.
_COUNT: Final = """
    WITH job AS MATERIALIZED (
        SELECT id FROM vectormill.jobs WHERE id = :job_id{is_wanted} FOR NO KEY UPDATE SKIP LOCKED
    ){noted}, earlier AS (
        DELETE FROM vectormill.job_increments AS increment USING job WHERE increment.job_id = job.id
        RETURNING {names}, stage_seconds
    ), counted AS MATERIALIZED (
        {own}SELECT * FROM earlier
    ), sums AS MATERIALIZED (
        SELECT count(*) AS num_counted, {totals},
               (SELECT coalesce(jsonb_object_agg(stage, seconds), '{{}}')
                  FROM (SELECT stage, sum(seconds::float8) AS seconds
                          FROM counted
                         CROSS JOIN LATERAL jsonb_each_text(counted.stage_seconds) AS part (stage, seconds)
                         GROUP BY stage) AS by_stage) AS stage_seconds
          FROM counted
    )
    UPDATE vectormill.jobs
       SET num_open_chunks = num_open_chunks - sums.num_chunks,
           {additions},
           stage_seconds = (
               SELECT coalesce(jsonb_object_agg(stage, round((total)::numeric, 4)), '{{}}')
                 FROM (SELECT stage, sum(seconds::float8) AS total
                         FROM (SELECT * FROM jsonb_each_text(jobs.stage_seconds)
                               UNION ALL
                               SELECT * FROM jsonb_each_text(sums.stage_seconds)) AS part (stage, seconds)
                        GROUP BY stage) AS totals),
           pace = CASE
               WHEN sums.num_done + sums.num_failed < 0 THEN NULL
               WHEN sums.num_chunks <= 0 THEN jobs.pace
               WHEN jobs.pace IS NULL THEN {mark} || {mark}
               WHEN {seconds} - jobs.pace[3] >= {pace_seconds} THEN jobs.pace[3:4] || {mark}
               ELSE jobs.pace END,
           updated_at = CASE WHEN sums.num_chunks <> 0 AND num_open_chunks = sums.num_chunks OR sums.num_done <> 0
                               OR sums.num_chunks < 0
                             THEN now() ELSE updated_at END,
           finished_at = CASE WHEN num_open_chunks > sums.num_chunks THEN NULL
                              WHEN state IN {received} THEN now() ELSE finished_at END,
           state = CASE
               WHEN num_open_chunks > sums.num_chunks AND state IN {finished} THEN 'queued'
               WHEN num_open_chunks > sums.num_chunks OR state NOT IN {received} THEN state
               WHEN state = 'cancelling' THEN 'cancelled'
               WHEN jobs.num_failed + sums.num_failed = 0 THEN 'completed'
               WHEN jobs.num_done + sums.num_done = 0 THEN 'failed'
               ELSE 'completed_with_errors' END
      FROM job, sums
     WHERE jobs.id = job.id AND (num_counted > 0 OR num_open_chunks = 0 AND state IN {received})
    RETURNING num_open_chunks = 0 AS is_finished
"""
_NAMES: Final = ", ".join(_SUMMED)
_OWN: Final = "CAST(:num_chunks AS integer) AS num_chunks, " + ", ".join(
    f"CAST(:{name} AS bigint) AS {name}" for name in _SUMMED[1:]
)


def _compose(is_wanted: str = "", noted: str = "", own: str = "") -> str:
    return _COUNT.format(
        is_wanted=is_wanted,
        noted=noted,
        own=own,
        names=_NAMES,
        totals=", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in _SUMMED),
        mark=f"ARRAY[{_SECONDS}, {_ENDED}]",
        seconds=_SECONDS,
        pace_seconds=_PACE_SECONDS,
        additions=", ".join(f"{name} = jobs.{name} + sums.{name}" for name in _SUMMED[1:]),
        finished=FINISHED_JOB_STATES,
        received=RECEIVED_JOB_STATES,
    )


# This is the last statement of a commit, so the job's row is locked only until COMMIT.
COUNT_CHUNK: Final = text(
    _compose(
        f" AND (num_open_chunks <= {_NEAR_END_CHUNKS} OR CAST(:is_turn AS boolean))",
        f""", noted AS (
        INSERT INTO vectormill.job_increments (job_id, {_NAMES}, stage_seconds)
        SELECT CAST(:job_id AS uuid), {_OWN}, CAST(:stage_seconds AS jsonb) WHERE NOT EXISTS (SELECT FROM job)
    )""",
        f"SELECT {_OWN}, CAST(:stage_seconds AS jsonb) AS stage_seconds UNION ALL ",
    )
)
ADD_UP: Final = text(_compose())
LIST_UNCOUNTED: Final = text("SELECT job_id FROM vectormill.job_increments GROUP BY job_id LIMIT 1000")
# The transaction that brings the counter of open chunks to zero also ends the job. These are jobs for which that did
# not happen, which no code path should cause. The statement reads all open jobs, so it is run rarely.
LIST_UNENDED: Final = text(f"""
    SELECT id FROM vectormill.jobs WHERE state IN {RECEIVED_JOB_STATES} AND num_open_chunks = 0
""")
FORGET_REMOVED: Final = text("""
    DELETE FROM vectormill.job_increments
     WHERE job_id = :job_id AND NOT EXISTS (SELECT FROM vectormill.jobs WHERE id = :job_id)
""")


def end_under_fence(connection: Connection, claim: Claim, ending: TextClause, **values: Any) -> None:
    """End a leased chunk by a statement such as COMMIT_CHUNK. Raise LeaseLost unless the claim is the newest one."""
    named = {"chunk_id": claim.chunk_id, "fence": claim.fence, **values}
    if connection.execute(ending, named).one_or_none() is None:
        raise LeaseLost


def count_chunk(
    connection: Connection, claim: Claim, outcome: ChunkOutcome, num_done: int, num_failed: int
) -> bool:
    """Count an ended chunk in the transaction that ends it. Return True if this has ended the job.

    A job near its end, or whose turn it is, is counted at once, if nobody holds its row.
    """
    values = {
        "job_id": claim.job_id,
        "is_turn": claim.chunk_id % _CHUNKS_PER_TURN == 0,
        "num_chunks": 1,
        "num_done": num_done,
        "num_failed": num_failed,
        "num_tokens": outcome.num_tokens,
        "num_computed_tokens": outcome.num_computed_tokens,
        "num_truncated": len(outcome.truncated),
        "num_passages": outcome.num_passages,
        "num_reused": outcome.num_reused,
        "num_repeated": outcome.num_repeated,
        "num_retried_chunks": 0,
        "stage_seconds": to_jsonb(dict(outcome.stage_seconds)),
    }
    return _is_finished(connection, values, COUNT_CHUNK)


def add_up_job(connection: Connection, job_id: UUID) -> bool:
    """Add up what was noted of a job, unless somebody else holds its row. Return True if this has ended it."""
    return _is_finished(connection, {"job_id": job_id}, ADD_UP)


def _is_finished(connection: Connection, values: Mapping[str, Any], statement: TextClause) -> bool:
    row = connection.execute(statement, values).one_or_none()
    return row is not None and bool(row.is_finished)


def add_up_jobs(engine: Engine, statement: TextClause = LIST_UNCOUNTED) -> int:
    """Add up what was noted of the jobs that the statement lists, each in a transaction of its own.

    Return the number of jobs.
    """
    with engine.connect() as connection:
        job_ids = list(connection.execute(statement).scalars())
    for job_id in job_ids:
        with engine.begin() as connection:
            add_up_job(connection, job_id)
            connection.execute(FORGET_REMOVED, {"job_id": job_id})
    return len(job_ids)


def end_finished_jobs(engine: Engine) -> int:
    """End jobs without open chunks that nobody has ended. Return their number."""
    return add_up_jobs(engine, LIST_UNENDED)


def rescue_expired_chunks(connection: Connection) -> int:
    """Make chunks whose lease has expired `pending` again, and count a lapse for each.

    Return the number of chunks.
    """
    return len(connection.execute(RESCUE_EXPIRED).all())


def rescue_unclaimed_chunks(connection: Connection, timeout_seconds: float, limit: int = 1000) -> int:
    """Make dispatched chunks that nobody claimed in time `pending` again. Return the number of chunks.

    Their message was lost, or no worker consumes the queue.
    """
    return len(connection.execute(RESCUE_UNCLAIMED, {"timeout": timeout_seconds, "limit": limit}).all())


def recall_paused_chunks(connection: Connection) -> int:
    """Make dispatched chunks of paused jobs `pending` again."""
    return len(connection.execute(RECALL_PAUSED).all())


def end_cancelled_jobs(connection: Connection) -> int:
    """End pending chunks of jobs that are being cancelled. Return the number of jobs that have ended with them."""
    job_ids = connection.execute(END_CANCELLING).scalars().all()
    return sum(add_up_job(connection, job_id) for job_id in job_ids)


def release_orphaned_chunks(engine: Engine, incarnation: UUID, reason: str, *, is_evidence: bool) -> int:
    """Hand back all chunks that an ended process of a worker held. Return the number of chunks.

    `is_evidence` says that the process ended because of a failure that the texts in progress may have caused.
    """
    values = {"tag": incarnation.hex[:8], "reason": reason, "is_evidence": is_evidence}
    with engine.begin() as connection:
        return len(connection.execute(RELEASE_ORPHANED, values).all())
