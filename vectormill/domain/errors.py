"""The errors that Vectormill raises on purpose: a tree of classes, each below the one that it is a kind of.

An error's docstring is its default message. Its `code` is stable, and is the last part of the problem `type` in
HTTP responses.
"""

import re
from typing import Self

from vectormill.domain.credentials import hide_credentials


class VectormillError(Exception):
    """Vectormill could not complete the operation."""

    code = "error"
    # False if messages show keys that may be addresses with a query, and quote no address that is read.
    hides_credentials = True

    def __init__(self, message: str | None = None) -> None:
        message = message or (type(self).__doc__ or "").strip()
        super().__init__(hide_credentials(message) if self.hides_credentials else message)

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()


class InvalidSubmission(VectormillError):
    """The submission is invalid; nothing was stored."""


class InvalidItem(InvalidSubmission):
    """An item of the submission cannot be read; nothing was stored."""


class DuplicateKey(InvalidSubmission):
    """Two items of the job have the same key; keys must be unique within a job."""

    hides_credentials = False


class EmptyJob(InvalidSubmission):
    """The job has no items; send at least one."""


class UnknownModel(InvalidSubmission):
    """The model is not registered; GET /v1/models lists the available models."""


class InvalidOption(InvalidSubmission):
    """An option of the job has an invalid value."""


class SubmissionTooLarge(InvalidSubmission):
    """The request body is too large; send large jobs as a stream of NDJSON."""


class NotFound(VectormillError):
    """The requested object does not exist."""


class JobNotFound(NotFound):
    """There is no job with this id; it may have been deleted, or removed when its retention ended."""


class CollectionNotFound(NotFound):
    """There is no collection with this name."""

    @classmethod
    def named(cls, name: str) -> Self:
        return cls(
            f"There is no collection {name!r}: see `vectormill collections list`, create it with "
            f"`vectormill collections create {name}`, or submit a job that names it."
        )


class GenerationNotFound(NotFound):
    """The collection has no generation with this number."""


class ItemNotFound(NotFound):
    """The collection has no item with this key."""


class RequestFileNotFound(NotFound):
    """There is no file with this id; it may have been deleted, or may have expired."""


class RequestBatchNotFound(NotFound):
    """There is no batch with this id; it may have been removed when its retention ended."""


class RunNotFound(NotFound):
    """There is no run with this id."""


class ScheduleNotFound(NotFound):
    """There is no schedule with this name."""


class SourceNotFound(NotFound):
    """The collection has no source; set one with `vectormill sources set`."""


class WebhookNotFound(NotFound):
    """There is no webhook with this id; `vectormill webhooks list` lists all webhooks."""


class DeliveryNotFound(NotFound):
    """The webhook has no delivery with this id; it may have been removed when its retention ended."""


class Conflict(VectormillError):
    """The request conflicts with the current state."""


class IdempotencyMismatch(Conflict):
    """This Idempotency-Key was already used for a different request; use a new key for a new request."""


class SubmissionInProgress(Conflict):
    """A submission with this Idempotency-Key is still being received; try again when it has finished."""


class UploadRemoved(Conflict):
    """The upload was removed because it sent no data for too long; send it again."""


class SpecMismatch(Conflict):
    """The collection's vectors were made with a different encoding spec; vector spaces are never mixed."""


class WrongKind(Conflict):
    """The collection stores a different kind of result than the request needs."""


class ModelNotServed(Conflict):
    """Every live worker of the model has failed to load it; nothing was stored."""


class RequestFileInUse(Conflict):
    """A batch is still reading the file; delete the file when the batch has read it, or cancel the batch."""


class WrongBatchState(Conflict):
    """The batch's state does not allow this."""


class WrongJobState(Conflict):
    """The job's state does not allow this."""


class WrongRunState(Conflict):
    """The run's state does not allow this."""


class SwapRefused(Conflict):
    """The live generation cannot be replaced, because other database objects depend on the collection's view."""


class RowsMissing(Conflict):
    """A rollback would lose rows that were written since the swap, because their texts are not stored."""


class TextsNotKept(Conflict):
    """The collection does not store texts, so it cannot be searched by words."""


class CodebookMissing(Conflict):
    """The multi-vectors of a row are residual codes, and the database does not have their codebook."""


class CollectionInUse(Conflict):
    """The collection cannot be deleted, because it is in use or other database objects depend on its view."""

    def __init__(self, message: str | None = None, *, is_passing: bool = False) -> None:
        """Create the error; `is_passing` says that the other users of the collection are about to end."""
        super().__init__(message)
        self.is_passing = is_passing


class TooManyCollections(Conflict):
    """The maximum number of collections has been reached; use an existing one."""


class TooManyWebhooks(Conflict):
    """The maximum number of webhooks has been reached; delete one first."""


class WebhookDisabled(Conflict):
    """The webhook is disabled, so nothing is sent to it; enable it first."""


class ObjectChanged(Conflict):
    """An object of the store has been changed or removed since the job was submitted."""


class OutputTaken(Conflict):
    """The folder for the job's results is not empty; each job needs one of its own."""


class DiskFull(Conflict):
    """The disk for temporary files has not enough room; make room, or set TMPDIR to another folder."""


class LimitReached(VectormillError):
    """The API has reached its limit on concurrent work; try again later."""


class BodyTimeout(VectormillError):
    """The request body stopped arriving; nothing was stored."""


# Errors of this kind stay inside a worker.
class ChunkError(VectormillError):
    """A worker could not finish a chunk."""


class LeaseLost(ChunkError):
    """The chunk's lease expired and another worker may hold it; nothing was written."""


class PayloadGone(ChunkError):
    """The chunk's texts were removed when its job's retention ended; there is nothing to encode."""


# Clients see an error of this kind as the reason why a run failed.
class RunError(VectormillError):
    """The run could not continue."""


class RunCancelled(RunError):
    """The run was cancelled by a client; what it had already done remains."""


class CanaryFailed(RunError):
    """The new generation failed its checks; the live generation stays in use."""


class SourceFailed(RunError):
    """The source could not be read to its end; nothing was deleted."""


class SourceInterrupted(SourceFailed):
    """Reading the source was interrupted; the run will read it again from the beginning."""


class ModelError(VectormillError):
    """The model cannot be loaded."""


class UnsupportedModel(ModelError):
    """No worker can encode with the model: its kind is not supported, or its files lack required information."""


class ModelDoesNotFit(ModelError):
    """The model does not fit on the devices, however it is divided."""


class Unavailable(VectormillError):
    """A required service is unavailable; try again later."""


class DatabaseUnavailable(Unavailable):
    """Postgres cannot be reached; try again later."""


class LocksHeld(Unavailable):
    """Other transactions have held a required lock for a minute; try again when they have ended."""


class QueryLost(Unavailable):
    """The workers that took the query stopped or failed; try again."""


class EncodingTimeout(Unavailable):
    """No worker answered in time; check that a worker for this model is running."""


class StorageUnavailable(Unavailable):
    """The object store refuses or does not answer; check its address and credentials."""


class SearchTimeout(Unavailable):
    """Postgres took too long to find the nearest rows; an index would make the search faster."""


class ConfigurationError(VectormillError):
    """A setting is invalid."""
