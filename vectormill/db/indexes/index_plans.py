"""What is planned for a generation's vector index: from its rows, its collection's wishes and the server's room."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection

from vectormill.db.indexes.indexes import (
    CollectionWishes,
    count_removed,
    count_rows,
    find_record,
    find_wishes,
    share_removed,
)
from vectormill.db.indexes.server_room import read_server_room
from vectormill.domain.collection import LIVE, Generation
from vectormill.domain.index_plan import IndexPlan, IndexWishes, plan_index
from vectormill.settings import Settings
from vectormill.vectors.vector_types import choose_vector_type

# What a run of kind `index` may ask for beside what the collection keeps, for this one build.
SHAPE_OPTIONS: Final = ("m", "ef_construction", "workers", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Outlook:
    """A plan, and what it was made of. `worn` is the share of rows deleted or replaced since the last build."""

    kept: CollectionWishes
    wishes: IndexWishes
    plan: IndexPlan
    vector_type: str
    num_rows: int
    num_removed: int
    worn: float
    record: Mapping[str, Any]


def plan_for(
    connection: Connection, generation: Generation, settings: Settings, options: Mapping[str, Any]
) -> Outlook:
    """`options` may name SHAPE_OPTIONS. Raises InvalidOption for values that pgvector refuses."""
    kept = find_wishes(connection, generation.id)
    asked = {name: options[name] for name in SHAPE_OPTIONS if options.get(name) is not None}
    wishes = IndexWishes.from_options(kept.policy, {**kept.options, **asked})
    vector_type = choose_vector_type(generation.spec, in_collection=True).name
    num_rows = count_rows(connection, generation.table_name)
    num_removed = count_removed(connection, generation.table_name)
    record = find_record(connection, generation.id)
    plan = plan_index(
        num_rows,
        generation.spec.dimensions,
        vector_type,
        wishes,
        read_server_room(connection),
        kind=generation.kind,
        is_live=generation.state == LIVE,
        least_rows=settings.index_rows,
        memory_share=settings.index_memory_share,
    )
    worn = share_removed(record, num_removed)
    return Outlook(kept, wishes, plan, vector_type, num_rows, num_removed, worn, record)
