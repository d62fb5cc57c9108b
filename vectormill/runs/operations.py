"""Operations on runs, with the bodies that API and client exchange."""

from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec
from msgspec import Meta, Struct

from vectormill.domain.encoding import EncodingOptions, OptionArguments
from vectormill.jobs.job import DEFAULT_PRIORITY, LEAST_URGENT_PRIORITY, MOST_URGENT_PRIORITY, Job
from vectormill.jobs.operations import QuoteBody
from vectormill.keys.api_key import READ, WRITE
from vectormill.moments import Moment
from vectormill.operation import Identifier, NextCursor, Operation, PageQuery, describe, one_of, struct_of
from vectormill.runs.run import DEFAULT_MAX_CHANGE_SHARE, REINDEX, RUN_KINDS, RUN_PHASES, RUN_STATES, Run

# Options that are passed to the phases of a run by the same names.
LIMITS: Final = (
    "max_change_share", "least_recall", "least_cosine", "canary_sample", "most_failed_share", "sample",
)  # fmt: skip
Share = Annotated[float, Meta(ge=0, le=1)]
Sample = Annotated[int, Meta(ge=0, le=10_000)]


class RunOptionsBody(struct_of(EncodingOptions)):  # type: ignore[misc]  # a base made at run time
    """Options of a run; encoding options make it build a new generation.

    Encoding options that are left out stay as in the live generation, or are the model's defaults if another model is
    given. If the result is another vector space, a new generation is built alongside the live one, and finally
    replaces it.
    """

    max_change_share: Annotated[
        Share | None,
        Meta(
            description="The largest share of the existing rows that may be encoded again or deleted; a run that would "
            f"change more is held. {DEFAULT_MAX_CHANGE_SHARE:g} by default."
        ),
    ] = None
    confirm: Annotated[bool, Meta(description="Do not hold the run, whatever the share.")] = False
    full: Annotated[
        bool,
        Meta(description="Read all rows of a source that names a column of changes, and find vanished ones."),
    ] = False
    sample: Annotated[
        Sample | None,
        Meta(description="For a check: the number of texts to encode again; 200 by default."),
    ] = None
    priority: Annotated[int, Meta(ge=MOST_URGENT_PRIORITY, le=LEAST_URGENT_PRIORITY)] = DEFAULT_PRIORITY
    least_recall: Annotated[
        Share | None,
        Meta(description="The minimum recall of a new generation's index; below it, the canary fails."),
    ] = None
    least_cosine: Annotated[
        Annotated[float, Meta(ge=-1, le=1)] | None,
        Meta(description="The minimum similarity of a new generation's texts to their second encoding."),
    ] = None
    canary_sample: Annotated[
        Sample | None, Meta(description="The number of a new generation's texts to encode again.")
    ] = None
    most_failed_share: Annotated[
        Share | None,
        Meta(
            description="The largest share of a new generation's rows that may fail for reasons other than their text."
        ),
    ] = None
    model: Annotated[str | None, Meta(description="A model name from GET /v1/models.")] = None

    def __post_init__(self) -> None:
        for text in self.of_spec().values():
            if isinstance(text, str) and any(
                letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in text
            ):
                raise ValueError("a text contains a NUL character or an unpaired UTF-16 surrogate")

    def to_options(self) -> dict[str, Any]:
        """Return the options that are stored with the run; the other fields become its spec."""
        given = {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}
        switches = {name: True for name in ("confirm", "full") if getattr(self, name)}
        return {"priority": self.priority} | switches | given

    def of_spec(self) -> dict[str, Any]:
        """Return the encoding options that were given in the request."""
        own = {*LIMITS, "confirm", "full", "priority"}
        said = msgspec.structs.asdict(self)
        return {name: value for name, value in said.items() if name not in own and value is not None}


class RunArguments(OptionArguments, total=False):
    """RunOptionsBody of a re-index as keyword arguments, for editors and type checkers only."""

    model: str | None
    priority: int | None
    confirm: bool
    full: bool
    max_change_share: float | None
    most_failed_share: float | None
    least_recall: float | None
    least_cosine: float | None
    canary_sample: int | None


class RunRequest(Struct, forbid_unknown_fields=True):
    """A run on a collection: `reindex` updates it from its source, `index` maintains its index, `check` measures it."""

    kind: Annotated[Literal["reindex", "index", "check"], one_of(RUN_KINDS)] = REINDEX
    options: RunOptionsBody = msgspec.field(default_factory=RunOptionsBody)
    dry_run: Annotated[
        bool,
        Meta(description="Answer a quote of what a re-index would take, with 200; start nothing."),
    ] = False


class EncodingBody(TypedDict):
    """Progress of a run's job."""

    num_items: int
    num_done: int
    num_failed: int
    items_per_second: float
    eta_seconds: float | None


class RunBody(TypedDict):
    """A run, in the same shape wherever the API returns it."""

    id: Identifier
    collection: str
    kind: Annotated[str, one_of(RUN_KINDS)]
    state: Annotated[str, one_of(RUN_STATES)]
    phase: Annotated[
        Annotated[str, one_of(RUN_PHASES)] | None,
        Meta(
            description="The current phase; null until an indexer has claimed the run, and once it has ended."
        ),
    ]
    counts: Annotated[dict[str, int], Meta(description="Rows of the source by outcome.")]
    job_id: Annotated[Identifier | None, Meta(description="The job that encodes its rows.")]
    encoding: Annotated[
        EncodingBody | None,
        Meta(
            description="The progress of that job, if a single run is shown in its phase encoding; else null."
        ),
    ]
    spec: Annotated[
        dict[str, Any] | None,
        Meta(description="The requested EncodingSpec; null means that of the live generation."),
    ]
    options: dict[str, Any]
    report: Annotated[dict[str, Any], Meta(description="Findings of each phase.")]
    error: Annotated[
        str | None,
        Meta(description="Why it failed, is held or was skipped; otherwise the error of its last attempt."),
    ]
    due_at: Annotated[
        Moment | None, Meta(description="The due time on its schedule; null if a client started the run.")
    ]
    attempt: Annotated[int, Meta(description="The number of claims by indexers in its current phase.")]
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None
    elapsed_seconds: Annotated[
        float, Meta(description="From its first claim by an indexer until its end or now.")
    ]


class RunPage(TypedDict):
    data: list[RunBody]
    next: NextCursor


def describe_run(run: Run, job: Job | None = None) -> RunBody:
    """Return the response body of a run, with the progress of its encoding job."""
    until = run.finished_at or run.now
    return describe(
        RunBody,
        run,
        counts=asdict(run.counts),
        encoding=None if job is None else describe(EncodingBody, job),
        spec=None if run.spec is None else run.spec.describe(),
        elapsed_seconds=(until - run.started_at).total_seconds() if run.started_at else 0.0,
    )


ONE: Final = "/v1/runs/{id}"
ALL_OF: Final = "/v1/collections/{name}/runs"

START: Final = Operation(
    "POST", ALL_OF, WRITE, RunBody, RunRequest, status=202, location=ONE, other_status=200, other_answer=QuoteBody,
    example={"kind": "reindex", "options": {"confirm": False}},
)  # fmt: skip
LIST: Final = Operation("GET", "/v1/runs", READ, RunPage, query=PageQuery)
LIST_OF: Final = Operation("GET", ALL_OF, READ, RunPage, query=PageQuery)
SHOW: Final = Operation("GET", "/v1/runs/{run_id}", READ, RunBody)
CANCEL: Final = Operation("POST", "/v1/runs/{run_id}/cancel", WRITE, RunBody)
CONFIRM: Final = Operation("POST", "/v1/runs/{run_id}/confirm", WRITE, RunBody, is_repeatable=False)
