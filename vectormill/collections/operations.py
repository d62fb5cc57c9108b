"""Operations on collections, their generations, indexes and items, with the bodies that API and client exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta, Struct

from vectormill.collections.collection import (
    AUTO,
    GENERATION_STATES,
    HNSW,
    INDEX_POLICIES,
    MULTI_VECTOR_CODES,
    NO_INDEX,
    Generation,
)
from vectormill.collections.index_plan import (
    LEAST_EF_CONSTRUCTION,
    LEAST_M,
    LEAST_MEMORY_BYTES,
    MOST_EF_CONSTRUCTION,
    MOST_FIELD_CHARS,
    MOST_FILTERS,
    MOST_M,
    MOST_MEMORY_BYTES,
    MOST_WORKERS,
    SHAPE_OPTIONS,
    check_fields,
)
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import RESULTS
from vectormill.files.formats import OUTPUT_FORMATS, RowsName
from vectormill.jobs.item import PASSAGE
from vectormill.jobs.operations import OptionsBody
from vectormill.keys.api_key import READ, WRITE
from vectormill.models.registry import DEFAULT_MODEL
from vectormill.moments import Moment
from vectormill.operation import NO_CONTENT, Identifier, NextCursor, Nothing, Operation, PageQuery, one_of
from vectormill.runs.operations import RunBody

Policy = Annotated[Literal["auto", "hnsw", "none"], one_of(INDEX_POLICIES)]
M = Annotated[int, Meta(ge=LEAST_M, le=MOST_M)]
EfConstruction = Annotated[int, Meta(ge=LEAST_EF_CONSTRUCTION, le=MOST_EF_CONSTRUCTION)]
Workers = Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
MultiVectorCodes = Annotated[
    Literal[0, 2],
    Meta(
        description="Keep multi-vectors as residual codes of 2 bits a dimension, from 1,000 rows on; 0 keeps halves."
    ),
]
MemoryBytes = Annotated[int, Meta(ge=LEAST_MEMORY_BYTES, le=MOST_MEMORY_BYTES)]
Options = dict[str, Any]

# A put waits at most this long for its item to be searchable.
MAX_WAIT_SECONDS: Final = 60.0
INCLUDE: Final = r"^(vector|score|output|metadata|text)(,(vector|score|output|metadata|text)){0,2}$"
KEEP_TEXT_DESCRIPTION: Final = (
    "Keep texts alongside their vectors: for full-text search, for answers that show them, and to encode "
    "them again without their source."
)
LANGUAGE_DESCRIPTION: Final = (
    "Language of full-text search: a text search configuration of Postgres, such as german."
)


class IndexOptionsBody(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The shape of the HNSW index, chosen by rows and memory where omitted, and the form of multi-vectors."""

    m: M | None = None
    ef_construction: EfConstruction | None = None
    workers: Workers | None = None
    memory_bytes: MemoryBytes | None = None
    multi_vector_codes: MultiVectorCodes | None = None


class CollectionRequest(Struct, forbid_unknown_fields=True):
    """A new collection."""

    name: Annotated[str, Meta(description="Also the name of its SQL view.", examples=["docs"])]
    model: str = DEFAULT_MODEL
    options: OptionsBody = msgspec.field(default_factory=OptionsBody)
    keep_text: Annotated[bool, Meta(description=KEEP_TEXT_DESCRIPTION)] = False
    language: Annotated[str, Meta(description=LANGUAGE_DESCRIPTION, examples=["german"])] = "simple"
    index_policy: Annotated[
        Policy,
        Meta(
            description="When to build an HNSW index: auto (from a certain size), hnsw (always) or none (never)."
        ),
    ] = "auto"
    index_options: IndexOptionsBody = msgspec.field(default_factory=IndexOptionsBody)


class CollectionChange(Struct, forbid_unknown_fields=True):
    """A change of a collection; omitted settings stay unchanged."""

    keep_text: Annotated[bool | None, Meta(description=KEEP_TEXT_DESCRIPTION)] = None
    language: Annotated[str | None, Meta(description=LANGUAGE_DESCRIPTION)] = None


class CollectionsQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The page of collections that a client asks for."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 200


class DescriptionQuery(Struct, forbid_unknown_fields=True):
    """The query parameters of a request for the description of one collection."""

    exact: Annotated[bool, Meta(description="Count the rows exactly, which reads every row.")] = False


class DeletionQuery(Struct, forbid_unknown_fields=True):
    """How a collection is deleted."""

    force: Annotated[bool, Meta(description="Cancel the jobs and runs that work on it first.")] = False


class RollbackQuery(Struct, forbid_unknown_fields=True):
    """How a collection is rolled back."""

    allow_missing: Annotated[
        bool,
        Meta(description="Roll back even if rows put since have no kept text and may be missing."),
    ] = False


class CollectionExportQuery(Struct, forbid_unknown_fields=True):
    """The part of a collection's rows that is exported, and its format."""

    format: RowsName = "ndjson"
    include: Annotated[
        Annotated[str, Meta(pattern=INCLUDE)] | None,
        Meta(
            description="vector (score or output, by the collection's kind), metadata and text, separated by "
            "commas; by default the first two. A text that is not kept is null."
        ),
    ] = None
    # This may be any key that Postgres can store.
    after: Annotated[
        str, Meta(pattern=r"^[^\u0000]*$", max_length=10_000, description="Only rows after this key.")
    ] = ""
    limit: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None, Meta(description="At most this many rows.")
    ] = None
    generation: Annotated[
        Annotated[int, Meta(ge=1, le=2**63 - 1)] | None,
        Meta(description="The generation that the export began with; by default the live one."),
    ] = None


class CollectionBody(TypedDict):
    """A collection in a list; its page has the same fields and more."""

    name: str
    kind: Annotated[
        str,
        one_of(tuple(result.kept_as for result in RESULTS.values())),
        Meta(description="Kind of result in its rows."),
    ]
    model: str
    dimensions: Annotated[
        int, Meta(description="Length of a vector; for scores the number of labels, for records 0.")
    ]
    options: Annotated[Options, Meta(description="The EncodingSpec of its live generation.")]
    num_rows: Annotated[int, Meta(description="Approximate number of rows, as estimated by Postgres.")]
    num_bytes: Annotated[
        int, Meta(description="Bytes on disk of all generations, with indexes and attributes.")
    ]
    num_generations: int
    keep_text: Annotated[bool, Meta(description="True if texts are kept alongside their results.")]
    language: Annotated[
        str,
        Meta(description="Language of full-text search: a text search configuration of Postgres."),
    ]
    note: Annotated[
        str | None,
        Meta(description="What of its model its vectors lack until it is encoded again; null if nothing."),
    ]
    created_at: Moment
    synced_at: Annotated[Moment | None, Meta(description="When the last successful re-index ended.")]
    stale_seconds: Annotated[float | None, Meta(description="Seconds since then; null if there was none.")]


class CollectionPage(TypedDict):
    data: list[CollectionBody]
    next: NextCursor


class CollectionIndexBody(TypedDict):
    name: str
    method: str
    state: Annotated[str, one_of(("ready", "building", "invalid"))]
    definition: Annotated[str, Meta(description="The statement that would create it.")]
    num_bytes: int


class GenerationBody(TypedDict):
    id: int
    state: Annotated[str, one_of(GENERATION_STATES)]
    fingerprint: Annotated[str, Meta(description="Sixteen hex digits that identify the vector space.")]
    model: str
    options: Options
    table: Annotated[
        str,
        Meta(description="Its table, for your own SQL; the collection's view reads the live one."),
    ]
    num_rows: Annotated[int, Meta(description="Approximate number of rows, as estimated by Postgres.")]
    table_bytes: int
    index_bytes: int
    attribute_bytes: Annotated[int, Meta(description="Bytes of metadata and kept texts, with their indexes.")]
    indexes: list[CollectionIndexBody]
    report: Annotated[
        dict[str, Any],
        Meta(description="Findings of its canary, and the choices for its index with reasons."),
    ]
    created_at: Moment
    live_at: Moment | None
    retired_at: Moment | None


class CoverageBody(TypedDict):
    """Coverage as of the last re-index that completed."""

    run_id: Identifier
    at: Moment
    num_seen: Annotated[int, Meta(description="Rows that the source had.")]
    num_failed: Annotated[int, Meta(description="Number of them that could not be encoded.")]
    share: Annotated[float, Meta(description="Share of the source's rows that have a vector, 0 to 1.")]
    failed_keys: Annotated[
        list[str],
        Meta(description="Some of the failed keys; `/v1/jobs/{job}/errors` of the run's job lists all."),
    ]


class StalenessBody(TypedDict):
    synced_at: Moment | None
    stale_seconds: float | None
    num_waiting_changes: Annotated[
        int, Meta(description="Changes recorded by triggers that are not encoded yet.")
    ]
    oldest_change_at: Moment | None


class OpenJobBody(TypedDict):
    id: Identifier
    state: str
    num_items: int
    num_done: int
    num_failed: int


class RunLine(TypedDict):
    """A run in short; `/v1/runs/{id}` shows it in full."""

    id: Identifier
    kind: str
    state: str
    phase: str | None
    num_seen: int
    num_failed: int
    error: str | None
    created_at: Moment
    finished_at: Moment | None


class SourceLine(TypedDict):
    kind: str
    options: Options
    split: Options


class ScheduleLine(TypedDict):
    """A schedule in short; `/v1/schedules/{name}` shows it in full."""

    name: str
    cron: str
    timezone: str
    next_due_at: Moment | None
    is_paused: bool


class CollectionDetail(CollectionBody):
    """A collection in full."""

    exact_rows: Annotated[
        int | None,
        Meta(
            description="Counted row by row; null for a table of more than 64 MiB unless requested by `exact`."
        ),
    ]
    fingerprint: str
    index_policy: str
    index_options: Options
    filters: Annotated[list[Any], Meta(description="Fields of the metadata that have an index.")]
    generations: Annotated[list[GenerationBody], Meta(description="Newest first.")]
    coverage: Annotated[CoverageBody | None, Meta(description="Null until a re-index has finished.")]
    staleness: StalenessBody
    open_jobs: Annotated[
        list[OpenJobBody], Meta(description="Jobs that write to it; only some of them if there are many.")
    ]
    runs: Annotated[list[RunLine], Meta(description="The newest.")]
    source: SourceLine | None
    schedules: list[ScheduleLine]


class LiveGenerationBody(TypedDict):
    """One generation, by what distinguishes it from others."""

    id: int
    fingerprint: str
    options: Annotated[Options, Meta(description="Its EncodingSpec.")]


class RollbackAnswer(TypedDict):
    """The changes that a rollback made."""

    collection: str
    live: LiveGenerationBody
    retired: LiveGenerationBody
    num_newer_rows: Annotated[
        int | None,
        Meta(
            description="Rows put since the retired generation became live, which the run carries over; null if "
            "counting them took too long."
        ),
    ]
    num_missing_rows: Annotated[
        int | None,
        Meta(description="Rows among these without a kept text: they are missing unless a job still has it."),
    ]
    run_id: Annotated[
        Identifier,
        Meta(description="The run that encodes newer rows for the generation that is live again."),
    ]


def describe_generation(generation: Generation) -> LiveGenerationBody:
    """Return a generation as the response to a rollback shows it."""
    spec = generation.spec
    return {"id": generation.id, "fingerprint": spec.fingerprint(), "options": spec.describe()}


class KeptItemQuery(Struct, forbid_unknown_fields=True):
    """The query parameters of a request for one item of a collection."""

    include: Annotated[
        Literal["vector"] | None,
        Meta(description="Include the embedding; scores and records are always included."),
    ] = None


class PutQuery(Struct, forbid_unknown_fields=True):
    """How long a client waits for a put."""

    wait_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_WAIT_SECONDS)] | None,
        Meta(
            description="Seconds to wait until the item is searchable; takes precedence over `Prefer: wait=…`."
        ),
    ] = None


KeyParameter = Annotated[str, Meta(min_length=1, description="The item's key.", examples=["json.dumps"])]


class OneItemQuery(Struct, forbid_unknown_fields=True):
    """The item of a collection that a request is about.

    Its key is a parameter, because clients remove the segments `.` and `..` from a path, encoded or not, so
    that the path of an item with such a key would reach another one.
    """

    key: KeyParameter


class KeptItemByKeyQuery(KeptItemQuery, kw_only=True):
    """The query parameters of a request for the item with a key."""

    key: KeyParameter


class PutByKeyQuery(PutQuery, kw_only=True):
    """The query parameters of a put under a key."""

    key: KeyParameter


class PutRequest(Struct, forbid_unknown_fields=True):
    """A put: what a collection is to contain under the key."""

    text: Annotated[str, Meta(examples=["A text to encode."])]
    text_pair: Annotated[
        str | None, Meta(description="Text to compare `text` with, in a collection of scores.")
    ] = None
    metadata: Annotated[
        dict[str, Any] | None, Meta(description="Kept alongside the result.", examples=[{"page": 1}])
    ] = None


class DeleteRequest(Struct, forbid_unknown_fields=True):
    """The keys of the items to delete."""

    keys: Annotated[list[str], Meta(examples=[["a", "b"]])]


class PutAnswer(TypedDict):
    """The outcome of a put."""

    key: str
    job: Annotated[Identifier, Meta(description="Its job, which is removed soon if the put was waited for.")]
    is_searchable: Annotated[
        bool, Meta(description="True if searches already find it; otherwise see its job.")
    ]
    searchable_at: Annotated[
        Moment | None, Meta(description="Since when it is searchable; null if it is not yet.")
    ]


class DeleteAnswer(TypedDict):
    """The outcome of a deletion."""

    num_keys: Annotated[int, Meta(description="Distinct keys in the request.")]
    num_deleted: Annotated[int, Meta(description="Number of them that the collection contained.")]


class PassageBody(TypedDict):
    """The place of a passage in its document, in code points."""

    index: int
    start: int
    end: int


class ItemAnswer(TypedDict):
    """An item of a collection, with the result fields of the collection's kind."""

    key: str
    text: Annotated[str | None, Meta(description="Null unless the collection keeps texts.")]
    text_pair: NotRequired[
        Annotated[str | None, Meta(description="Second text of a pair, if texts are kept.")]
    ]
    metadata: dict[str, Any] | None
    document: Annotated[str | None, Meta(description="The key of the document whose passage it is.")]
    passage: PassageBody | None
    content_hash: Annotated[
        str, Meta(description="Hash of the text: 16 bytes of BLAKE2b, in hexadecimal digits.")
    ]
    job_seq: Annotated[int, Meta(description="Sequence number of the job that wrote it, among all writers.")]
    embedding: NotRequired[
        Annotated[
            list[float] | None,
            Meta(description="In the collection's vector type; requested by `include=vector`."),
        ]
    ]
    score: NotRequired[Annotated[float | None, Meta(description="The score, in a collection of scores.")]]
    label: NotRequired[
        Annotated[str | None, Meta(description="The label of the score; null for a model with one number.")]
    ]
    probabilities: NotRequired[
        Annotated[dict[str, float] | None, Meta(description="The number for each label.")]
    ]
    output: NotRequired[
        Annotated[
            dict[str, Any] | None,
            Meta(description="Records found in the item, by their first type, in a collection of records."),
        ]
    ]


def find_passage(metadata: Mapping[str, Any]) -> tuple[str | None, PassageBody | None]:
    """Return the document's key and the passage's place in it, or (None, None) for a row that is not a passage.

    Other values of the same metadata field are ignored, since clients may write anything there.
    """
    said = metadata.get(PASSAGE)
    if not isinstance(said, dict):
        return None, None
    place: Any = {name: said.get(name) for name in ("index", "start", "end")}
    if not isinstance(said.get("document"), str) or not all(type(number) is int for number in place.values()):
        return None, None
    return said["document"], place


class IndexRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Index settings to change; omitted ones stay. All but `rebuild` and `drop` are stored."""

    policy: Annotated[
        Policy | None,
        Meta(description="Build an HNSW index from VECTORMILL_INDEX_ROWS on, always, or never."),
    ] = None
    m: Annotated[
        M | None,
        Meta(description="Neighbours of a row in the graph."),
    ] = None
    ef_construction: Annotated[
        EfConstruction | None,
        Meta(description="Candidates examined for each row; at least twice m."),
    ] = None
    workers: Annotated[
        Workers | None,
        Meta(description="Parallel processes for a build."),
    ] = None
    memory_bytes: Annotated[
        MemoryBytes | None,
        Meta(description="maintenance_work_mem for a build."),
    ] = None
    filters: Annotated[
        Annotated[Sequence[str], Meta(max_length=MOST_FILTERS)] | None,
        Meta(
            description=f"All metadata fields to index, each of at most {MOST_FIELD_CHARS} characters; a dot leads "
            "into an object, and * is one index over all metadata."
        ),
    ] = None
    multi_vector_codes: MultiVectorCodes | None = None
    bm25: Annotated[bool, Meta(description="Rank words by BM25 of pg_textsearch.")] | None = None
    rebuild: Annotated[bool, Meta(description="Rebuild the vector index even if it is usable.")] = False
    drop: Annotated[bool, Meta(description="Drop the vector index; the policy becomes none.")] = False

    def choose_policy(self) -> str | None:
        """Return the requested index policy, or None. Raise InvalidOption if `drop` contradicts other fields."""
        if not self.drop:
            return self.policy
        if self.rebuild or self.policy in (AUTO, HNSW):
            raise InvalidOption(
                "An index cannot be dropped and requested at once: drop means the policy none."
            )
        return NO_INDEX

    def shape(self) -> dict[str, int]:
        """Return the options that are set, as they are stored with the collection."""
        names = (*SHAPE_OPTIONS, MULTI_VECTOR_CODES, "bm25")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def fields(self) -> list[str] | None:
        """Return the metadata fields to be indexed, without duplicates, or None. Raise InvalidOption."""
        return None if self.filters is None else check_fields(self.filters)


class OneIndexBody(TypedDict):
    """An existing index."""

    name: str
    method: str
    operator_class: str
    is_valid: Annotated[
        bool, Meta(description="False while it is being built, and after an interrupted build.")
    ]
    is_ours: Annotated[
        bool, Meta(description="False for an index that somebody created by hand, which is never changed.")
    ]
    options: dict[str, int]
    num_bytes: int
    last_used_at: Moment | None


class IndexPlanBody(TypedDict):
    """The index that would be built now, with reasons."""

    method: Annotated[str | None, Meta(description="hnsw, or null for none.")]
    operator_class: str | None
    m: int
    ef_construction: int
    workers: int
    memory_bytes: int
    graph_bytes: int
    reasons: list[str]


class BuildProgressBody(TypedDict):
    """A build in progress, by pg_stat_progress_create_index."""

    phase: str
    share: Annotated[
        float | None, Meta(description="Completed share of the phase, 0 to 1; null while unknown.")
    ]
    tuples_done: int
    tuples_total: int
    blocks_done: int
    blocks_total: int


class IndexBody(TypedDict):
    """The indexes of a collection's live generation."""

    collection: str
    generation: int
    policy: Annotated[str, one_of(INDEX_POLICIES)]
    options: Annotated[dict[str, Any], Meta(description="Requested shape, stored for every build.")]
    filters: list[str]
    num_rows: Annotated[int, Meta(description="An estimate for a large collection.")]
    changed_share: Annotated[
        float,
        Meta(description="Rows deleted or replaced since the build, as a share of the rows at that time."),
    ]
    indexes: list[OneIndexBody]
    plan: IndexPlanBody
    sparse_plan: Annotated[
        IndexPlanBody | None, Meta(description="For the output sparse; null if there is none.")
    ]
    built: Annotated[
        dict[str, Any],
        Meta(
            description="Facts about the vector index's build, with reasons; empty without an index. `sparse` has "
            "those of the index of sparse weights, with `num_unindexed`, the rows that had too many weights for it."
        ),
    ]
    progress: BuildProgressBody | None


ALL: Final = "/v1/collections"
ONE: Final = "/v1/collections/{name}"
INDEX: Final = ONE + "/index"
ITEMS: Final = ONE + "/items"
# The router parses the key with the path convertor `item_key`, since a key may contain any character.
ITEM: Final = ITEMS + "/{key:item_key}"

LIST: Final = Operation("GET", ALL, READ, CollectionPage, query=CollectionsQuery)
SHOW: Final = Operation("GET", ONE, READ, CollectionDetail, query=DescriptionQuery)
# A create is not retried: a second attempt would be refused, since the first has taken the name.
CREATE: Final = Operation(
    "POST", ALL, WRITE, CollectionDetail, CollectionRequest, status=201, is_repeatable=False,
    example={"name": "docs", "keep_text": True, "language": "english"},
)  # fmt: skip
CHANGE: Final = Operation(
    "PATCH", ONE, WRITE, CollectionDetail, CollectionChange, example={"keep_text": True}, is_slow=True
)
DELETE: Final = Operation("DELETE", ONE, WRITE, Nothing, query=DeletionQuery, status=NO_CONTENT, is_slow=True)
EXPORT: Final = Operation(
    "GET", ONE + "/export", READ, Nothing, query=CollectionExportQuery,
    media_types=tuple(each.media_type for each in OUTPUT_FORMATS.values() if each.has_keys),
)  # fmt: skip

# A rollback is not retried: a second one would undo the first.
ROLL_BACK: Final = Operation(
    "POST", ONE + "/rollback", WRITE, RollbackAnswer, query=RollbackQuery, is_repeatable=False, is_slow=True
)
DISCARD: Final = Operation(
    "DELETE", ONE + "/generations/{generation_id}", WRITE, Nothing, status=NO_CONTENT, is_repeatable=False,
    is_slow=True,
)  # fmt: skip

SHOW_INDEX: Final = Operation("GET", INDEX, READ, IndexBody)
# A change of indexes is not retried: a second attempt would queue a second run.
CHANGE_INDEX: Final = Operation(
    "PUT", INDEX, WRITE, RunBody, IndexRequest, status=202, location="/v1/runs/{id}", is_repeatable=False,
    example={"policy": "auto", "filters": ["lang", "year"]},
)  # fmt: skip

SHOW_ITEM: Final = Operation("GET", ITEMS, READ, ItemAnswer, query=KeptItemByKeyQuery)
PUT_ITEM: Final = Operation(
    "PUT", ITEMS, WRITE, PutAnswer, PutRequest, query=PutByKeyQuery, other_status=202, is_slow=True,
    example={"text": "A text to encode.", "metadata": {"page": 1}},
)  # fmt: skip
DELETE_ITEM: Final = Operation(
    "DELETE", ITEMS, WRITE, Nothing, query=OneItemQuery, status=NO_CONTENT, skips_confirmation=True
)
# The same with the key in the path, for keys that no client changes there.
SHOW_ITEM_AT: Final = replace(SHOW_ITEM, path=ITEM, query=KeptItemQuery)
PUT_ITEM_AT: Final = replace(PUT_ITEM, path=ITEM, query=PutQuery)
DELETE_ITEM_AT: Final = replace(DELETE_ITEM, path=ITEM, query=Nothing)
DELETE_ITEMS: Final = Operation(
    "POST", ITEMS + ":delete", WRITE, DeleteAnswer, DeleteRequest, example={"keys": ["a", "b"]}, is_slow=True
)
