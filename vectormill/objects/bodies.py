"""Texts in and results out of object storage, as the API takes and answers them."""

from typing import Annotated, Final, TypedDict

from msgspec import Meta, Struct

from vectormill.files.formats import InputName
from vectormill.rows.columns import Columns

MOST_URLS: Final = 1000

OutputUrl = Annotated[
    str | None,
    Meta(
        description="An empty folder of an object store for the results, instead of Postgres: Parquet parts and a "
        "`_manifest.json`. Or a table of Iceberg, `iceberg://catalog/namespace.table`, to which they are added.",
        examples=["s3://bucket/vectors"],
    ),
]


class InputBody(Struct, forbid_unknown_fields=True):
    """Objects of a store whose rows are the items of a job. Workers read them; no text goes through the API."""

    urls: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=2000)]],
        Meta(
            min_length=1,
            max_length=MOST_URLS,
            description="Objects, or patterns with `*`, `?` and `**`: s3://, gs://, az:// or file://.",
            examples=[["s3://bucket/articles/*.parquet"]],
        ),
    ]
    text: Annotated[str, Meta(description="The column with the text.")] = "text"
    key: Annotated[
        str | None,
        Meta(description="The column with the key. Without it an item is named by its object and position."),
    ] = None
    text_pair: Annotated[str | None, Meta(description="The column with the second text of a pair.")] = None
    metadata: Annotated[list[str], Meta(description="Columns that are kept with each result.")] = []
    unique: Annotated[
        bool,
        Meta(description="Read all keys first, and refuse the job if two are equal."),
    ] = False
    format: Annotated[InputName | None, Meta(description="Null: by the name of each object.")] = None

    @property
    def columns(self) -> Columns:
        return Columns(self.text, self.key, self.text_pair, tuple(self.metadata))


class InputProgressBody(TypedDict):
    """The objects of a job that an indexer reads, because that takes longer than a request should."""

    state: Annotated[str, Meta(description="waiting, reading, read, failed or cancelled.")]
    num_items: Annotated[int, Meta(description="Rows that were found so far.")]
    num_compared: Annotated[int, Meta(description="Rows whose keys were compared so far, with `unique`.")]
    error: Annotated[
        str | None, Meta(description="Why the objects cannot become a job, or why the last try failed.")
    ]


class OutputBody(TypedDict):
    """The folder with a job's results. From the state `closed` on it has its manifest, and the table its parts."""

    url: str
    state: Annotated[str, Meta(description="open, ended, closing, closed, sweeping or swept.")]
    table: Annotated[str | None, Meta(description="The table of Iceberg that gets the results at the end.")]
    error: Annotated[str | None, Meta(description="Why the last try to close or sweep it failed.")]
