"""The errors that Vectormill raises on purpose, as a tree.

VectormillError
├── InvalidSubmission         the client's input is wrong; nothing was stored
│   ├── InvalidItem           one line or item cannot be read
│   ├── DuplicateKey          two items of a job share a key
│   ├── EmptyJob
│   ├── UnknownModel
│   ├── InvalidOption
│   └── SubmissionTooLarge
├── NotFound
│   ├── JobNotFound
│   ├── CollectionNotFound
│   ├── GenerationNotFound
│   ├── ItemNotFound
│   ├── RequestFileNotFound
│   ├── RequestBatchNotFound
│   ├── RunNotFound
│   ├── ScheduleNotFound
│   ├── SourceNotFound
│   ├── WebhookNotFound
│   └── DeliveryNotFound
├── Conflict                  the request is well formed but does not fit the present state
│   ├── IdempotencyMismatch
│   ├── SubmissionInProgress
│   ├── UploadRemoved
│   ├── SpecMismatch
│   ├── WrongKind
│   ├── RequestFileInUse      an unfinished request batch reads it
│   ├── WrongBatchState
│   ├── WrongJobState
│   ├── WrongRunState
│   ├── SwapRefused           the view cannot be pointed at another generation
│   ├── RowsMissing           a rollback would leave out rows whose texts are not kept
│   ├── TextsNotKept          a text search of a collection without texts
│   ├── CollectionInUse       other work uses it, or objects depend on its view
│   ├── TooManyCollections
│   ├── TooManyWebhooks
│   └── WebhookDisabled       nothing is sent to it until it is enabled
├── LimitReached              the API is as busy as a setting allows; trying again later helps
├── BodyTimeout               the client began to send and fell silent
├── ChunkError                inside a worker; never reaches a client
│   ├── LeaseLost
│   └── PayloadGone
├── RunError                  inside an indexer; clients see it as the reason why a run failed
│   ├── RunCancelled
│   ├── CanaryFailed          a new generation is not fit to be searched
│   └── SourceFailed          the source cannot be read, or not to its end
│       └── SourceInterrupted  reading it again may help
├── ModelError                a model cannot be loaded as asked
│   ├── ModelDoesNotFit
│   └── UnsupportedModel      its files do not say how to encode with it, or no task supports its kind
├── Unavailable               a service is unreachable or too slow; trying again later helps
│   ├── DatabaseUnavailable
│   ├── LocksHeld             other transactions hold a lock that is needed
│   ├── QueryLost
│   ├── EncodingTimeout       no worker encoded a query in time
│   └── SearchTimeout         a search read more rows than its time allows
└── ConfigurationError

An error's docstring is its default message. Its `code` is stable, and is the last part of the problem `type` in
HTTP responses.
"""

import re


class VectormillError(Exception):
    """Vectormill could not do what was asked."""

    code = "error"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()


class InvalidSubmission(VectormillError):
    """The submission is not valid; nothing was stored."""


class InvalidItem(InvalidSubmission):
    """An item of the submission cannot be read; nothing was stored."""


class DuplicateKey(InvalidSubmission):
    """Two items of the job have the same key; keys must be unique within a job."""


class EmptyJob(InvalidSubmission):
    """The job has no items; send at least one."""


class UnknownModel(InvalidSubmission):
    """The model is not registered; see GET /v1/models for the names that exist."""


class InvalidOption(InvalidSubmission):
    """An option of the job has a value that cannot be used."""


class SubmissionTooLarge(InvalidSubmission):
    """The request body is too large; send large jobs as a stream of NDJSON."""


class NotFound(VectormillError):
    """There is no such thing."""


class JobNotFound(NotFound):
    """There is no job with this id; it may have been deleted, or removed when its retention ended."""


class CollectionNotFound(NotFound):
    """There is no collection with this name."""


class GenerationNotFound(NotFound):
    """The collection has no generation of this number."""


class ItemNotFound(NotFound):
    """The collection has no item with this key."""


class RequestFileNotFound(NotFound):
    """There is no file with this id; it may have been deleted, or its time was over."""


class RequestBatchNotFound(NotFound):
    """There is no batch with this id; it may have been removed when its retention ended."""


class RunNotFound(NotFound):
    """There is no run with this id."""


class ScheduleNotFound(NotFound):
    """There is no schedule with this name."""


class SourceNotFound(NotFound):
    """The collection has no source; set one with `vectormill sources set`."""


class WebhookNotFound(NotFound):
    """There is no webhook with this id; `vectormill webhooks list` has all."""


class DeliveryNotFound(NotFound):
    """The webhook has no delivery with this id; it may have been removed when its retention ended."""


class Conflict(VectormillError):
    """The request does not fit the present state."""


class IdempotencyMismatch(Conflict):
    """This Idempotency-Key was used for a request with other content; use a new key for a new request."""


class SubmissionInProgress(Conflict):
    """A submission with this Idempotency-Key is still being received; try again when it has ended."""


class UploadRemoved(Conflict):
    """The upload was silent for so long that it was removed; send it again."""


class SpecMismatch(Conflict):
    """The collection's vectors were made with another encoding spec; vector spaces are never mixed."""


class WrongKind(Conflict):
    """The collection keeps another kind of results than this is about."""


class RequestFileInUse(Conflict):
    """A batch that has not ended reads the file; delete it when the batch has read it, or cancel the batch."""


class WrongBatchState(Conflict):
    """The batch's state does not allow this."""


class WrongJobState(Conflict):
    """The job's state does not allow this."""


class WrongRunState(Conflict):
    """The run's state does not allow this."""


class SwapRefused(Conflict):
    """Another generation cannot become the live one, since other objects depend on the collection's view."""


class RowsMissing(Conflict):
    """A rollback would leave out rows that were put since the swap, because their texts are not kept."""


class TextsNotKept(Conflict):
    """The collection keeps no texts, so it cannot be searched by words."""


class CollectionInUse(Conflict):
    """Others work on the collection, or depend on its view, so that it cannot be deleted."""

    def __init__(self, message: str | None = None, *, is_passing: bool = False) -> None:
        """Create the error; `is_passing` says that the other users of the collection are about to end."""
        super().__init__(message)
        self.is_passing = is_passing


class TooManyCollections(Conflict):
    """There are as many collections as a setting allows; use one that exists."""


class TooManyWebhooks(Conflict):
    """There are as many webhooks as there can be; delete one first."""


class WebhookDisabled(Conflict):
    """The webhook is disabled, so nothing is sent to it; enable it first."""


class LimitReached(VectormillError):
    """The API does as much at once as a setting allows; try again later."""


class BodyTimeout(VectormillError):
    """The body of the request did not go on; nothing was stored."""


class ChunkError(VectormillError):
    """A worker could not finish a chunk."""


class LeaseLost(ChunkError):
    """The chunk's lease expired and another worker may hold it; nothing was written."""


class PayloadGone(ChunkError):
    """The chunk's texts were removed when its job's retention ended; there is nothing to encode."""


class RunError(VectormillError):
    """A run could not go on."""


class RunCancelled(RunError):
    """A client cancelled the run; what it had done until then stays."""


class CanaryFailed(RunError):
    """The new generation is not fit to be searched; the live one stays."""


class SourceFailed(RunError):
    """The source could not be read to its end; nothing was deleted."""


class SourceInterrupted(SourceFailed):
    """The source was lost while it was read; the run reads it again from its beginning."""


class ModelError(VectormillError):
    """The model cannot be loaded."""


class UnsupportedModel(ModelError):
    """No worker can encode with the model, because of what it is or of what its files lack."""


class ModelDoesNotFit(ModelError):
    """The model does not fit on the devices, however it is divided."""


class Unavailable(VectormillError):
    """Something that is needed is away; try again later."""


class DatabaseUnavailable(Unavailable):
    """Postgres cannot be reached; try again later."""


class LocksHeld(Unavailable):
    """Other transactions hold what this would need for itself, for a minute already; try again when they have ended."""


class QueryLost(Unavailable):
    """The workers that had the query are gone, or met an error; try again."""


class EncodingTimeout(Unavailable):
    """No worker answered in time; check that a worker for this model is running."""


class SearchTimeout(Unavailable):
    """Postgres took too long to find the nearest rows; an index makes it fast."""


class ConfigurationError(VectormillError):
    """A setting is wrong."""
