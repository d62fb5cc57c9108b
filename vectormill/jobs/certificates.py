"""The certificate of a job: a digest for each chunk, and the workers that computed it, as lines of JSON.

The lines are written while chunks are read, in memory that does not grow with the job. The last line has a
digest over all lines before it.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from vectormill.domain.errors import WrongJobState
from vectormill.jobs.export import find_written, read_blocks, read_stored
from vectormill.jobs.item import Items
from vectormill.jobs.job import Job
from vectormill.moments import format_moment

FORMAT: Final = "vectormill job certificate 1"

FIND_CHUNK: Final = text("""
    SELECT id, is_suspect, proof_id, earlier_proofs FROM vectormill.chunks
     WHERE job_id = :job_id AND first_item = :first_item AND state <> 'split'
""")
LIST_PROOFS: Final = text("""
    SELECT id, worker, report, proven_at, failed_at, reason FROM vectormill.proofs
     WHERE id = ANY(CAST(:ids AS bigint[])) ORDER BY id
""")


@dataclass(frozen=True, slots=True)
class CertifiedChunk:
    """The digest of one chunk's items and results, its row, and what is known of the proofs of its results."""

    first_item: int
    num_items: int
    num_results: int
    digest: str
    row: Any
    proofs: Sequence[Any]

    @property
    def end(self) -> int:
        """Return the position after the last item of the chunk."""
        return self.first_item + self.num_items


def write_certificate_lines(engine: Engine, job_id: UUID) -> Iterator[bytes]:
    """Yield the lines of an ended job's certificate.

    Raise JobNotFound, WrongJobState if the job has not ended, and the errors of an export before the first
    line.
    """
    job, generation_id = find_written(engine, job_id)
    if not job.is_terminal:
        raise WrongJobState(f"The job is {job.state}; it has a certificate when it has ended.")

    def make_chunk(
        connection: Connection, first_item: int, items: Items, own: bytes | None, *_: object
    ) -> CertifiedChunk:
        results, present = read_stored(connection, job, generation_id, items, own)
        values = {"job_id": job_id, "first_item": first_item}
        row = connection.execute(FIND_CHUNK, values).one_or_none()
        ids = [] if row is None else [*(row.earlier_proofs or ()), row.proof_id]
        proofs = connection.execute(LIST_PROOFS, {"ids": ids}).all()
        digest = digest_chunk(items, results, present)
        return CertifiedChunk(first_item, len(items), int(present.sum()), digest, row, proofs)

    return _write(job, read_blocks(engine, job, make_chunk, 0))


def _write(job: Job, chunks: Iterator[CertifiedChunk]) -> Iterator[bytes]:
    whole = hashlib.sha256()

    def line(kind: str, **content: Any) -> bytes:
        written = json.dumps({"kind": kind, **content}, ensure_ascii=False).encode() + b"\n"
        whole.update(written)
        return written

    yield line(
        "job",
        format=FORMAT,
        id=str(job.id),
        state=job.state,
        spec=job.spec.to_json(),
        collection=job.collection,
        num_items=job.num_items,
        num_done=job.num_done,
        num_failed=job.num_failed,
        created_at=format_moment(job.created_at),
        finished_at=format_moment(job.finished_at),
    )
    told: set[int] = set()  # the periods of workers whose line was written
    num_chunks = num_suspect = 0
    for chunk in chunks:
        row = chunk.row
        known = {proof.id for proof in chunk.proofs}
        for proof in chunk.proofs:
            if proof.id in told:
                continue
            told.add(proof.id)
            yield line(
                "proof",
                id=proof.id,
                worker=proof.worker,
                report=proof.report,
                proven_at=format_moment(proof.proven_at),
                failed_at=format_moment(proof.failed_at),
                reason=proof.reason,
            )
        has_failed = any(proof.failed_at is not None for proof in chunk.proofs)
        is_suspect = row is not None and bool(row.is_suspect or has_failed)
        last = None if row is None or row.proof_id not in known else row.proof_id
        num_chunks, num_suspect = num_chunks + 1, num_suspect + is_suspect
        yield line(
            "chunk",
            id=None if row is None else row.id,
            first_item=chunk.first_item,
            num_items=chunk.num_items,
            num_results=chunk.num_results,
            proof=last,
            **({"earlier_proofs": sorted(known - {last})} if known - {last} else {}),
            suspect=is_suspect,
            digest=chunk.digest,
        )
    digest = whole.hexdigest()
    yield line("end", num_chunks=num_chunks, num_suspect_chunks=num_suspect, digest=digest)


def digest_chunk(items: Items, results: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> str:
    """Return the SHA-256 over key, content hash and result hash of each item, in order.

    A key is preceded by its length in 4 bytes. The result hash is the BLAKE2b of 16 bytes of the stored
    result, or 16 zeros for an item without one.
    """
    digest = hashlib.sha256()
    keys: Sequence[str] = items.keys
    for place, (key, content) in enumerate(zip(keys, items.content_hashes(), strict=True)):
        encoded = key.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "big") + encoded + content)
        digest.update(hash_result(results[place]) if present[place] else bytes(16))
    return digest.hexdigest()


def hash_result(result: Any) -> bytes:
    """Return the 16-byte hash of a stored result: the little-endian numbers of a row, or the bytes of a record."""
    content = result if isinstance(result, bytes) else np.ascontiguousarray(result).tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


LIST_PRECISIONS: Final = text("""
    SELECT DISTINCT proof.report #>> '{precision,value}' AS precision
      FROM vectormill.chunks
      JOIN vectormill.proofs AS proof ON proof.id = ANY(array_append(chunks.earlier_proofs, chunks.proof_id))
     WHERE chunks.job_id = :job_id AND proof.report #>> '{precision,value}' IS NOT NULL
""")


def list_precisions(connection: Connection, job_id: UUID) -> list[str]:
    """Return the precisions of the workers that computed the job, as far as they are known."""
    return list(connection.execute(LIST_PRECISIONS, {"job_id": job_id}).scalars())
