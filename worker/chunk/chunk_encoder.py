"""The `encode.chunk` task: claim a chunk, load its texts, encode them and commit the results.

It handles every way in which a chunk can end. It knows the engine and the sink, not the model or the device.
It raises no errors: the task's result says how the chunk ended, and what happens next is decided in Postgres.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine

from vectormill.db.outages import DATABASE_ERRORS, blames_a_value, describe_refusal, is_lasting, is_outage
from vectormill.domain.errors import (
    DatabaseUnavailable,
    LeaseLost,
    ModelError,
    ObjectChanged,
    PayloadGone,
    SpecMismatch,
    StorageUnavailable,
    VectormillError,
)
from vectormill.jobs.bottleneck import LOAD, PERSIST
from vectormill.jobs.chunk import ChunkOutcome, Claim, load_blob, open_payload, read_known
from vectormill.jobs.chunks import ClaimedChunk, claim_chunk, mark_alone, release_chunk, split_chunk
from vectormill.jobs.completion import cancel_chunk, fail_chunk
from vectormill.jobs.item import (
    CRASHED_WORKER,
    ENCODING_FAILED,
    INPUT_CHANGED,
    ITEM_ERROR_CODES,
    NOT_STORED,
    Item,
    ItemFailure,
    Items,
)
from vectormill.jobs.job import INTERACTIVE_PRIORITY
from vectormill.processes.logs import logging_with
from vectormill.settings import Settings
from vectormill.tracing import NOTHING, Note, is_tracing, note_past, span
from worker.chunk.calibrator import Calibrator
from worker.chunk.commit import PostgresSink
from worker.chunk.counts import DONE, ChunkCounts, Timesheet
from worker.chunk.leases import ChunkLease, LeaseKeeper, Quarantine
from worker.engine.engine import Engine as EncodingEngine
from worker.engine.request import EncodeRequest, EncodeResult, EncodingCancelled, EngineStopped, RunnerDied
from worker.identity import WorkerIdentity

logger = logging.getLogger(__name__)

Result = dict[str, Any]

# A chunk with this many losses is split instead of being tried whole again. After its first loss it is
# encoded alone.
MAX_LOST = 2
# A chunk whose lease lapsed this often is split as well, in case one of its texts is the reason: a process
# that the kernel kills for its memory leaves no message. A lapse is no evidence, so a single text is tried
# without limit.
MAX_LAPSED = 4
_LONGEST_DELAY_SECONDS = 60.0
# The pause before a chunk is offered again to workers with another revision of its model.
_OTHER_MODEL_SECONDS = 15.0
# The errors that no repetition cures, and the code that the chunk's items fail with.
_HOPELESS: Final[Mapping[type[VectormillError], str]] = {
    SpecMismatch: NOT_STORED,
    PayloadGone: ENCODING_FAILED,
    ObjectChanged: INPUT_CHANGED,
}
# The pause before a chunk is tried again whose object could not be read, or whose part could not be written.
_STORAGE_SECONDS = 15.0


class ChunkEncoder:
    """Processes one chunk from message to commit. Several threads of Celery call it at the same time."""

    def __init__(
        self,
        database: Engine,
        encoding: EncodingEngine,
        keeper: LeaseKeeper,
        sink: PostgresSink,
        timesheet: Timesheet,
        identity: WorkerIdentity,
        settings: Settings,
        on_end: Callable[[], object] = lambda: None,
        counts: ChunkCounts | None = None,
        read_period: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Keep what every chunk needs.

        `on_end` is called when a claimed chunk has left this worker. `read_period` returns the current period
        between two proofs.
        """
        self._database = database
        self._committing = database.execution_options(isolation_level="AUTOCOMMIT")
        self._encoding = encoding
        self._calibrator = Calibrator(database, encoding.encode)
        self._keeper = keeper
        self._sink = sink
        self._timesheet = timesheet
        self._identity = identity
        self._settings = settings
        self._on_end = on_end
        self._counts = counts or ChunkCounts()
        self._read_period = read_period
        self._quarantine = Quarantine()

    def encode_chunk(self, chunk_id: int) -> Result:
        """Claim, encode and commit the chunk if it still needs encoding.

        Return the result that Flower shows.
        """
        started = time.monotonic()
        result = self._claim_and_encode(chunk_id, started)
        self._counts.note_end(result["outcome"], time.monotonic() - started)
        return result

    def _claim_and_encode(self, chunk_id: int, started: float) -> Result:
        asked = time.time()
        try:
            with self._committing.connect() as connection:  # a single statement, which commits by itself
                claimed = claim_chunk(
                    connection,
                    chunk_id,
                    self._identity.owner,
                    self._identity.model,
                    self._settings.lease_seconds,
                )
            if claimed is None:
                return {"outcome": "duplicate"}
            self._counts.note_claim(claimed)
            try:
                claim = claimed.claim
                names = {"job_id": str(claim.job_id), "chunk_id": claim.chunk_id, "model": claim.spec.model}
                with (
                    self._timesheet.hold(claim.job_id),
                    logging_with(**names),
                    trace_chunk(claimed, asked) if is_tracing() else NOTHING as note,
                ):
                    result = self._encode_claimed(claimed, started)
                    note.tell(**result)
                    return result
            finally:
                self._on_end()
        except DATABASE_ERRORS as error:
            # Nothing was written. The lease lapses, or the dispatch times out, and the chunk runs again.
            answer = "is not responding" if is_outage(error) else "reported an error"
            logger.warning("Chunk %d: Postgres %s: %s", chunk_id, answer, error)
            return {"outcome": "database unavailable"}

    def _encode_claimed(self, claimed: ClaimedChunk, started: float) -> Result:
        """Encode a claimed chunk and handle every failure. Raise one of DATABASE_ERRORS in an outage."""
        claim = claimed.claim
        try:
            claim.check_space()  # checked before any device time is spent
            if self._is_to_be_isolated(claim):
                return self._isolate(claim)
            return self._encode_leased(claim, claimed, started)
        except tuple(_HOPELESS) as error:
            logger.error("Chunk %d was not encoded: %s", claim.chunk_id, error)
            return self._give_up(claim, _HOPELESS[type(error)], str(error))
        except LeaseLost:
            self._counts.note_stale_write()
            return {"outcome": "lease lost"}
        except DatabaseUnavailable as error:
            logger.warning("Chunk %d was not committed: %s", claim.chunk_id, error)
            return {"outcome": "not encoded", "reason": str(error)}
        except StorageUnavailable as error:
            # The store or its credentials may come back; the job says meanwhile what it waits for.
            logger.warning("Chunk %d waits for object storage: %s", claim.chunk_id, error)
            self._release(claim, str(error), is_counted=False, delay=_STORAGE_SECONDS)
            return {"outcome": "no storage", "reason": str(error)}
        except DATABASE_ERRORS as error:
            if is_outage(error):
                raise
            is_isolated = self._is_to_be_isolated(claim)
            if blames_a_value(error) and not is_isolated and _num_wanted(claim) > 1:
                return self._split(claim, f"split because Postgres rejected it: {describe_refusal(error)}")
            if is_lasting(error) or is_isolated:
                return self._give_up(claim, NOT_STORED, describe_refusal(error))
            logger.exception("Chunk %d failed", claim.chunk_id)
            return self._count_failure(claim, error)
        except Exception as error:
            logger.exception("Chunk %d failed", claim.chunk_id)
            if self._is_to_be_isolated(claim):
                return self._give_up(claim, ENCODING_FAILED, f"{type(error).__name__}: {error}")
            return self._count_failure(claim, error)

    def _encode_leased(self, claim: Claim, claimed: ClaimedChunk, started: float) -> Result:
        lease = ChunkLease(claim)
        try:
            # The lease is held until the commit has succeeded, however long that waits.
            with self._keeper.hold(lease), self._quarantine.enter(lease.ended, is_suspect=claim.lost > 0):
                if claim.lost:
                    with self._database.begin() as connection:
                        mark_alone(connection, claim)
                with span("load"):
                    items = open_payload(claimed.payload, claim.chunk_id, claimed.places)
                loaded = time.monotonic()
                # Do not use `or` here: half of a split chunk may want none of its items, and an empty list
                # does not mean all.
                some = claim.wanted_items(0, claim.num_items)
                wanted = np.array(range(claim.num_items) if some is None else some, dtype=np.int64)
                self._calibrator.prepare(claim.spec, lease.ended)
                with span("encode") as note:
                    encoded = self._encoding.encode(self._request(claim, items, wanted), lease.ended)
                    note.tell(**{f"{stage}_seconds": each for stage, each in encoded.stage_seconds.items()})
                return self._commit(claim, items, wanted, encoded, started, loaded)
        except EncodingCancelled:
            if lease.is_lost:
                return {"outcome": "lease lost"}
            self._write(claim, lambda connection: cancel_chunk(connection, claim))
            return {"outcome": "cancelled"}
        except EngineStopped:
            return self._hand_back(claim)
        except RunnerDied as error:
            is_lost = error.is_suspect
            delay = 0.0 if is_lost else 2.0**claim.lapsed - 1
            self._release(
                claim, str(error), is_counted=False, is_lost=is_lost, is_lapsed=not is_lost, delay=delay
            )
            return {"outcome": "model process died", "suspect": is_lost}
        except ModelError as error:
            # A worker with the job's revision of the model may take the chunk: during an upgrade both
            # revisions are served.
            logger.error("Chunk %d needs a different model from this worker's: %s", claim.chunk_id, error)
            self._release(claim, str(error), is_counted=False, delay=_OTHER_MODEL_SECONDS)
            return {"outcome": "other model", "reason": str(error)}

    def _hand_back(self, claim: Claim) -> Result:
        self._release(claim, "the worker was asked to stop", is_counted=False)
        return {"outcome": "handed back"}

    def _count_failure(self, claim: Claim, error: Exception) -> Result:
        self._release(claim, f"{type(error).__name__}: {error}", is_counted=True, delay=2.0**claim.attempt)
        return {"outcome": "failed", "reason": str(error)}

    def _request(self, claim: Claim, items: Items, wanted: NDArray[np.int64]) -> EncodeRequest:
        return EncodeRequest(
            request_id=f"{claim.chunk_id}/{claim.fence}",
            spec=claim.spec,
            texts=items.texts if len(wanted) == len(items) else items.take(wanted.tolist()).texts,
            interactive=claim.job_priority == INTERACTIVE_PRIORITY,
            max_text_chars=self._settings.max_text_chars,
        )

    def _commit(
        self,
        claim: Claim,
        items: Items,
        wanted: NDArray[np.int64],
        encoded: EncodeResult,
        started: float,
        loaded: float,
    ) -> Result:
        encoded_at = time.monotonic()
        stage_seconds = {LOAD: loaded - started, **encoded.stage_seconds}
        self._timesheet.count(stage_seconds)
        outcome = ChunkOutcome(
            failures={int(wanted[position]): failure for position, failure in encoded.failures.items()},
            num_tokens=int(encoded.num_tokens.sum()),
            num_computed_tokens=encoded.num_computed_tokens,
            truncated=wanted[encoded.truncated].tolist(),
            num_passages=encoded.num_passages,
            num_reused=encoded.num_reused,
            stage_seconds=stage_seconds | self._timesheet.take(claim.job_id),
            item_tokens=encoded.num_tokens.tolist(),
            proof_id=self._read_period(),
        )
        with span("commit"):
            uncounted_seconds = self._sink.commit(claim, items, wanted, encoded.results, outcome)
        committed = time.monotonic()
        self._timesheet.count({PERSIST: committed - encoded_at - uncounted_seconds})
        self._timesheet.carry(claim.job_id, PERSIST, uncounted_seconds)
        return {
            "outcome": DONE,
            "rows": len(wanted) - len(outcome.failures),
            "failed": len(outcome.failures),
            "reused": encoded.num_reused,
            "tokens": outcome.num_tokens,
            "tokens_per_second": round(outcome.num_tokens / (committed - started)),
            "encode_ms": round(1000 * (encoded_at - loaded)),
            "commit_ms": round(1000 * (committed - encoded_at)),
        }

    def _is_to_be_isolated(self, claim: Claim) -> bool:
        if claim.lost >= MAX_LOST or claim.attempt > self._settings.max_attempts:
            return True
        return claim.lapsed >= MAX_LAPSED and _num_wanted(claim) > 1

    def _isolate(self, claim: Claim) -> Result:
        """Split a chunk that keeps ending its workers. If only one item is left, fail that item."""
        tries = f"{claim.lost} losses, {claim.attempt - 1} failed attempts, {claim.lapsed} lapsed leases"
        if claim.num_items > 1 and _num_wanted(claim) > 1:
            return self._split(claim, f"split after {tries}")
        return self._give_up(claim, CRASHED_WORKER if claim.lost >= MAX_LOST else ENCODING_FAILED, tries)

    def _split(self, claim: Claim, reason: str) -> Result:
        self._write(claim, lambda connection: split_chunk(connection, claim, reason))
        return {"outcome": "split"}

    def _give_up(self, claim: Claim, code: str, reason: str) -> Result:
        """Fail all wanted items of the chunk, so that its job ends in any case, but none after a bad proof."""
        try:
            period = self._read_period()
        except EngineStopped:
            return self._hand_back(claim)
        failure = ItemFailure(code, f"{ITEM_ERROR_CODES[code]} ({reason})")
        logger.error("Chunk %d failed for good: %s", claim.chunk_id, failure.detail)

        def fail(connection: Connection) -> None:
            fail_chunk(connection, claim, self._load_items(connection, claim), failure, period)

        self._write(claim, fail)
        return {"outcome": "item failed" if claim.num_items == 1 else "chunk failed", "code": code}

    def _load_items(self, connection: Connection, claim: Claim) -> Sequence[Item]:
        """Return the chunk's items as far as its payload tells them; without it, items with empty keys."""
        try:
            blob, places = load_blob(connection, claim.chunk_id)
            return replace(read_known(blob), places=places)
        except DATABASE_ERRORS:
            raise
        except Exception:
            logger.exception("Cannot read the texts of chunk %d", claim.chunk_id)
            return [Item("", b"")] * claim.num_items

    def _release(self, claim: Claim, reason: str, *, delay: float = 0.0, **counts: bool) -> None:
        """Hand the chunk back. `counts` say as what, as in release_chunk."""
        delay = min(delay, _LONGEST_DELAY_SECONDS)
        self._write(
            claim, lambda connection: release_chunk(connection, claim, reason, delay_seconds=delay, **counts)
        )

    def _write(self, claim: Claim, write: Callable[[Connection], object]) -> None:
        """Run `write` in one short fenced transaction.

        Ignore a lost lease, since another worker has then taken over.
        """
        try:
            with self._database.begin() as connection:
                write(connection)
        except LeaseLost:
            self._counts.note_stale_write()
            logger.info("Chunk %d was taken over by another worker.", claim.chunk_id)


@contextmanager
def trace_chunk(claimed: ClaimedChunk, asked: float) -> Iterator[Note]:
    """Open the span of a chunk, with its wait in Redis and its claim.

    Its message was received at `asked` (Unix time).
    """
    claim, now = claimed.claim, time.time()
    # This wait is measured by the database's clock, which also set the message's time.
    waited = claimed.dispatch_seconds
    began = asked if waited is None else min(asked, now - waited)
    with span(
        "chunk",
        kind="consumer",
        parent=claim.traceparent,
        began=began,
        job_id=str(claim.job_id),
        chunk_id=claim.chunk_id,
        model=claim.spec.model,
        items=claim.num_items,
        estimated_tokens=claim.num_tokens,
        fence=claim.fence,
        attempt=claim.attempt,
    ) as note:
        if began < asked:
            note_past("wait in redis", began, asked)
        note_past("claim", asked, now)
        yield note


def _num_wanted(claim: Claim) -> int:
    return claim.num_items if claim.only_items is None else len(claim.only_items)
