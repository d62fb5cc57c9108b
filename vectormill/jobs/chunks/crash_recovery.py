"""Recovery of the chunks of a worker whose process has ended: they return at once, with what its end tells."""

from uuid import UUID

from sqlalchemy import Connection, Engine, text

from vectormill.jobs.chunks.chunk import Claim

MARK_ALONE = text("""
    UPDATE vectormill.chunks SET is_alone = true WHERE id = :chunk_id AND fence = :fence AND state = 'leased'
""")


def mark_alone(connection: Connection, claim: Claim) -> None:
    """Notes that nothing else is being encoded beside this chunk: if the process ends now, it is to blame."""
    connection.execute(MARK_ALONE, {"chunk_id": claim.chunk_id, "fence": claim.fence})


# A chunk that was alone is to blame, and others that waited for it are not. Of several that were at work together any
# may be: they are suspects, and the next time each is alone. A row that is locked lapses by itself.
RELEASE_BEREAVED = text("""
    WITH held AS (
        SELECT id, is_alone, bool_or(is_alone) OVER () AS is_known
          FROM (SELECT id, is_alone FROM vectormill.chunks
                 WHERE state = 'leased' AND right(lease_owner, 8) = :tag
                   FOR NO KEY UPDATE SKIP LOCKED) AS locked
    ), released AS (
        UPDATE vectormill.chunks AS chunk
           SET state = 'pending', lease_owner = NULL, lease_until = NULL, available_at = now(), error = :reason,
               attempt = greatest(attempt - 1, 0),
               lost = CASE WHEN :is_evidence AND held.is_alone THEN lost + 1
                           WHEN :is_evidence AND NOT held.is_known THEN greatest(lost, 1)
                           ELSE lost END,
               lapsed = lapsed + CASE WHEN :is_evidence THEN 0 ELSE 1 END
          FROM held WHERE chunk.id = held.id
        RETURNING chunk.job_id
    )
    SELECT job_id, count(*) AS num_chunks FROM released GROUP BY job_id
""")

COUNT_RETRIED = text("""
    UPDATE vectormill.jobs SET num_retried_chunks = num_retried_chunks + :num_chunks WHERE id = :job_id
""")


def release_orphaned_chunks(engine: Engine, incarnation: UUID, reason: str, *, is_evidence: bool) -> int:
    """Hands back what an incarnation of a worker held that is known to have ended; how many chunks.

    `is_evidence`: it ended by a fault of its own, which the texts at work may have caused. Each job is counted in a
    transaction of its own, because the reaper alone may lock several jobs at once.
    """
    values = {"tag": incarnation.hex[:8], "reason": reason, "is_evidence": is_evidence}
    with engine.begin() as connection:
        released = connection.execute(RELEASE_BEREAVED, values).all()
    for job_id, num_chunks in released:
        with engine.begin() as connection:
            connection.execute(COUNT_RETRIED, {"job_id": job_id, "num_chunks": num_chunks})
    return sum(num_chunks for _, num_chunks in released)
