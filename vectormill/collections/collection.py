"""Types of collections: a collection is a named set of results of one kind, read through a SQL view of that name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, WrongKind
from vectormill.domain.states import GOOD, WAITING, State, States
from vectormill.domain.task import RESULTS, TASKS, VECTORS

BUILDING: Final = "building"
LIVE: Final = "live"
RETIRED: Final = "retired"
PRUNED: Final = "pruned"  # its tables are gone; jobs that wrote it still name it


@dataclass(frozen=True, slots=True)
class GenerationState(State):
    """A state of generations. The sets of states in SQL statements are derived from these properties."""

    is_written: bool = False  # by jobs, runs and puts
    is_searched: bool = False
    has_tables: bool = True  # in which deletions remove rows, too


_ROWS: Final = (
    GenerationState(BUILDING, WAITING, is_written=True),
    GenerationState(LIVE, GOOD, is_written=True, is_searched=True),
    GenerationState(RETIRED),
    GenerationState(PRUNED, has_tables=False),
)

GENERATION_STATE_BY_NAME: Final = {state.name: state for state in _ROWS}
GENERATION_STATES: Final = States(GENERATION_STATE_BY_NAME)
WRITTEN_GENERATION_STATES: Final = States(state.name for state in _ROWS if state.is_written)
FORMER_GENERATION_STATES: Final = States(state.name for state in _ROWS if not state.is_written)
STORED_GENERATION_STATES: Final = States(state.name for state in _ROWS if state.has_tables)
# These can be discarded.
UNSEARCHED_GENERATION_STATES: Final = States(
    state.name for state in _ROWS if state.has_tables and not state.is_searched
)

# The index policies: an HNSW index from a number of rows on, always, or never.
AUTO: Final = "auto"
HNSW: Final = "hnsw"
NO_INDEX: Final = "none"

INDEX_POLICIES: Final = (AUTO, HNSW, NO_INDEX)

# The index option of residual codes: 2 for codes of 2 bits a dimension, 0 for halves.
MULTI_VECTOR_CODES: Final = "multi_vector_codes"

# A name is a lower-case SQL identifier, so that `SELECT … FROM docs` needs no quotes; Postgres keeps 63 bytes of it.
COLLECTION_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")

# These are the reserved words by pg_get_keywords() of Postgres 18; a test compares them. `SELECT … FROM user` would not
# even fail: it returns the name of the database's user.
RESERVED_WORDS: Final = frozenset({
    "all", "analyse", "analyze", "and", "any", "array", "as", "asc", "asymmetric", "authorization", "binary",
    "both", "case", "cast", "check", "collate", "collation", "column", "concurrently", "constraint", "create",
    "cross", "current_catalog", "current_date", "current_role", "current_schema", "current_time",
    "current_timestamp", "current_user", "default", "deferrable", "desc", "distinct", "do", "else", "end", "except",
    "false", "fetch", "for", "foreign", "freeze", "from", "full", "grant", "group", "having", "ilike", "in",
    "initially", "inner", "intersect", "into", "is", "isnull", "join", "lateral", "leading", "left", "like",
    "limit", "localtime", "localtimestamp", "natural", "not", "notnull", "null", "offset", "on", "only", "or",
    "order", "outer", "overlaps", "placing", "primary", "references", "returning", "right", "select",
    "session_user", "similar", "some", "symmetric", "system_user", "table", "tablesample", "then", "to", "trailing",
    "true", "union", "unique", "user", "using", "variadic", "verbose", "when", "where", "window", "with",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation: one build of a collection with one EncodingSpec, in its own table."""

    id: int
    collection_id: int
    collection: str
    spec: EncodingSpec
    table_name: str
    state: str

    @property
    def kind(self) -> str:
        return find_kind(self.spec)


@dataclass(frozen=True, slots=True)
class CollectionOptions:
    """The options with which a collection is created. `language` is a text search configuration of Postgres."""

    keep_text: bool = False
    language: str = "simple"
    index_policy: str = AUTO
    index_options: Mapping[str, Any] = field(default_factory=dict)


def find_kind(spec: EncodingSpec) -> str:
    """Return the kind of collection that keeps results of this spec."""
    return RESULTS[spec.result].kept_as


def check_kind(collection: str, kept: str, spec: EncodingSpec) -> None:
    """Raise WrongKind unless results of the spec fit the collection, whose kind is `kept`."""
    if find_kind(spec) != kept:
        fitting = " or ".join(task.name for task in TASKS.values() if RESULTS[task.result].kept_as == kept)
        raise WrongKind(
            f"Collection {collection!r} contains {kept}, but the task {spec.task} produces {find_kind(spec)}; "
            "the kind of a collection never changes. Use another collection, or the task "
            f"{fitting} with a model that supports it."
        )


def require_vectors(collection: str, kind: str, wanted: str) -> None:
    """Raise WrongKind unless the collection keeps vectors; `wanted` begins the message, such as "A search compares"."""
    if kind != VECTORS:
        raise WrongKind(
            f"{wanted} vectors, but collection {collection!r} contains {kind}; query its view in SQL instead."
        )


def check_collection_name(name: str) -> str:
    """Return the name if it is allowed for a collection; else raise InvalidOption, which states the rule."""
    if not COLLECTION_NAME.fullmatch(name):
        raise InvalidOption(
            f"Invalid collection name {name!r}: it becomes a SQL view, so it must start with a lower-case letter or "
            "underscore and contain only lower-case letters, digits and underscores, at most 63."
        )
    return name
