"""Quotes as the API answers them and the client returns them, and what a quote of a source is asked with."""

from typing import Annotated, TypedDict

import msgspec
from msgspec import Meta

from vectormill.domain.encoding import DEFAULT_MODEL
from vectormill.jobs.bodies import CollectionName, OptionsBody, Priority
from vectormill.jobs.job import DEFAULT_PRIORITY
from vectormill.moments import Moment
from vectormill.sources.bodies import SourceRequest


class FigureBody(TypedDict):
    """A likely value, and the interval in which it is expected."""

    value: float
    least: float
    most: float


class QuoteBody(TypedDict):
    """A quote says what a job or a re-index would take. Times are null if no live worker has measured its rate."""

    model: str
    rows: FigureBody
    num_sampled: Annotated[int, Meta(description="Rows whose tokens were counted.")]
    tokens_per_row: Annotated[FigureBody, Meta(description="What the model reads of a row, on average.")]
    truncated: Annotated[
        FigureBody, Meta(description="Share of the rows that have more tokens than the model reads at once.")
    ]
    repeated: Annotated[FigureBody, Meta(description="Share of the rows whose text another row has.")]
    kept: Annotated[
        FigureBody | None,
        Meta(
            description="Share of the rows that the collection has with the same text and model. A re-index does not "
            "encode them, a job does. Null without a collection of this model."
        ),
    ]
    tokens: Annotated[FigureBody, Meta(description="Tokens of all rows that would be encoded.")]
    tokens_per_second: Annotated[FigureBody | None, Meta(description="Of all workers together.")]
    seconds: Annotated[FigureBody | None, Meta(description="Until the end, if no other job waits.")]
    queue_seconds: Annotated[FigureBody | None, Meta(description="Of jobs that come before or take turns.")]
    ends_at: Annotated[
        list[Moment] | None,
        Meta(description="When the job would end: likely, at the earliest, at the latest."),
    ]
    host_cores: Annotated[
        FigureBody | None, Meta(description="Cores that tokenize and commit, besides the devices.")
    ]
    rows_bytes: Annotated[FigureBody, Meta(description="Disk for the rows in Postgres.")]
    texts_bytes: Annotated[
        FigureBody, Meta(description="Disk for the job's texts in Postgres until its end.")
    ]
    index_bytes: Annotated[
        FigureBody | None, Meta(description="Memory of the index and of its build, and its disk.")
    ]
    index_seconds: FigureBody | None
    index_reason: Annotated[str, Meta(description="Why there is no index; empty if there is one.")]
    notes: Annotated[list[str], Meta(description="How the figures were found, in sentences.")]


class QuoteRequest(SourceRequest, forbid_unknown_fields=True):
    """A source of rows, and how they would be encoded."""

    model: str = DEFAULT_MODEL
    collection: CollectionName = None
    priority: Priority = DEFAULT_PRIORITY
    encoding: OptionsBody = msgspec.field(default_factory=OptionsBody)
