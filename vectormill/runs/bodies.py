"""Request and response bodies of runs, shared by API and client."""

from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec
from msgspec import Meta, Struct

from vectormill.domain.encoding import EncodingOptions
from vectormill.encoding_options import struct_of
from vectormill.jobs.job import DEFAULT_PRIORITY, LEAST_URGENT_PRIORITY, MOST_URGENT_PRIORITY, Job
from vectormill.moments import Moment
from vectormill.operation import Identifier, NextCursor, describe, one_of
from vectormill.runs.run import DEFAULT_MAX_CHANGE_SHARE, REINDEX, RUN_KINDS, RUN_PHASES, RUN_STATES, Run

# Options that are passed to the phases of a run by the same names.
LIMITS: Final = (
    "max_change_share", "least_recall", "least_cosine", "canary_sample", "most_failed_share", "sample",
)  # fmt: skip
Share = Annotated[float, Meta(ge=0, le=1)]
Sample = Annotated[int, Meta(ge=0, le=10_000)]


class RunOptionsBody(struct_of(EncodingOptions)):  # type: ignore[misc]  # a base made at run time
    """Options of a run; encoding options make it build a new generation.

    What is left out of these stays as in the live generation, or is the habit of the model if another one is named. If
    that means another vector space, a new generation is built beside the live one, and takes its place in the end.
    """

    max_change_share: Annotated[
        Share | None,
        Meta(
            description="Share of the existing rows that may be encoded again or deleted; the run is held if it "
            f"would be more. {DEFAULT_MAX_CHANGE_SHARE:g} unless it is given."
        ),
    ] = None
    confirm: Annotated[bool, Meta(description="Whatever the share, it is not held.")] = False
    sample: Annotated[
        Sample | None,
        Meta(description="For a check: number of texts encoded again; 200 by default."),
    ] = None
    priority: Annotated[int, Meta(ge=MOST_URGENT_PRIORITY, le=LEAST_URGENT_PRIORITY)] = DEFAULT_PRIORITY
    least_recall: Annotated[
        Share | None, Meta(description="Least recall of a new generation's index; less fails its canary.")
    ] = None
    least_cosine: Annotated[
        Annotated[float, Meta(ge=-1, le=1)] | None,
        Meta(description="Least similarity of texts of a new generation to their second encoding."),
    ] = None
    canary_sample: Annotated[
        Sample | None, Meta(description="So many of a new generation's texts are encoded again.")
    ] = None
    most_failed_share: Annotated[
        Share | None,
        Meta(description="Share of a new generation's rows that may fail through no fault of their text."),
    ] = None
    model: Annotated[str | None, Meta(description="A name of GET /v1/models.")] = None

    def __post_init__(self) -> None:
        for text in self.of_spec().values():
            if isinstance(text, str) and any(
                letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in text
            ):
                raise ValueError("a text contains a NUL character or half of a UTF-16 surrogate pair")

    def to_options(self) -> dict[str, Any]:
        """Return the options that are stored with the run; the other fields become its spec."""
        given = {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}
        return {"priority": self.priority} | ({"confirm": True} if self.confirm else {}) | given

    def of_spec(self) -> dict[str, Any]:
        """Return the encoding options that were given in the request."""
        own = {*LIMITS, "confirm", "priority"}
        said = msgspec.structs.asdict(self)
        return {name: value for name, value in said.items() if name not in own and value is not None}


class RunRequest(Struct, forbid_unknown_fields=True):
    """A run of a collection: `reindex` follows its source, `index` sees to its vector index, `check` measures."""

    kind: Annotated[Literal["reindex", "index", "check"], one_of(RUN_KINDS)] = REINDEX
    options: RunOptionsBody = msgspec.field(default_factory=RunOptionsBody)


class EncodingBody(TypedDict):
    """Progress of a run's job."""

    num_items: int
    num_done: int
    num_failed: int
    items_per_second: float
    eta_seconds: float | None


class RunBody(TypedDict):
    """A run, in the same shape wherever it is answered."""

    id: Identifier
    collection: str
    kind: Annotated[str, one_of(RUN_KINDS)]
    state: Annotated[str, one_of(RUN_STATES)]
    phase: Annotated[
        Annotated[str, one_of(RUN_PHASES)] | None,
        Meta(description="Where it is, or was at its end; null before an indexer took it."),
    ]
    counts: Annotated[dict[str, int], Meta(description="Rows of the source by what became of them.")]
    job_id: Annotated[Identifier | None, Meta(description="The job that encodes for it.")]
    encoding: Annotated[
        EncodingBody | None,
        Meta(description="How far that job is, of a single run in its phase encoding; null elsewhere."),
    ]
    spec: Annotated[
        dict[str, Any] | None, Meta(description="The EncodingSpec it was asked for; null for the live one.")
    ]
    options: dict[str, Any]
    report: Annotated[dict[str, Any], Meta(description="Findings of each phase.")]
    error: Annotated[
        str | None,
        Meta(description="Why it failed, is held or was skipped; else the error of its last attempt."),
    ]
    due_at: Annotated[
        Moment | None, Meta(description="Due time on its schedule; null if a client asked for the run.")
    ]
    attempt: Annotated[int, Meta(description="Claims by an indexer since it came to its phase.")]
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None
    elapsed_seconds: Annotated[float, Meta(description="Since an indexer took it, until its end or now.")]


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
