"""Imports: rows whose vectors exist enter a collection without being encoded.

An imported row is older than whatever a job, a put or a deletion writes (its place in the order of writers is 0), and
rows that the collection has are left as they are. So an import can run beside other writers, and be repeated.

Deleted keys are left out too, as long as the collection remembers each of its deletions: for a day after its creation.
Later an import has to be told that deleted rows may come back.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, text

from vectormill.collections.collection import LIVE, Generation
from vectormill.collections.collections import keeps_texts, list_written_generations
from vectormill.collections.generation_tables import find_ranges, upsert_rows
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import CollectionNotFound, Conflict, SpecMismatch
from vectormill.domain.task import VECTOR
from vectormill.jobs.item import Items
from vectormill.vectors.representations import NORM_TOLERANCE
from vectormill.vectors.vector_types import find_unfit, make_column_rows

# Below every number that a job or a deletion has.
IMPORTED_PLACE: Final = 0

# Deleted keys are not brought back.
LIST_KNOWN_KEYS: Final = """
    SELECT key FROM vectormill.{table} WHERE key = ANY(CAST(:keys AS text[]))
     UNION
    SELECT key FROM vectormill.tombstones
     WHERE collection_id = :collection_id AND key = ANY(CAST(:keys AS text[]))
"""


# `delete_scrubbed` waits an hour longer, so a transaction that has passed this check sees all tombstones.
REMEMBERS_DELETIONS: Final = text("""
    SELECT created_at > clock_timestamp() - make_interval(days => 1)
      FROM vectormill.collections WHERE id = :collection_id
""")


def find_import_target(connection: Connection, collection: str, *, again: bool = False) -> Generation:
    """Return the generation that an import writes, locked until the transaction ends.

    Raise CollectionNotFound, Conflict if there is another generation, whose rows an import would not be among, or if
    rows that were deleted might come back and `again` does not allow it, and SpecMismatch if the collection has other
    results than dense vectors.
    """
    generations = list_written_generations(connection, collection, is_deletion=True)
    live = next((each for each in generations if each.state == LIVE), None)
    if live is None:
        raise CollectionNotFound.named(collection)
    if len(generations) > 1:
        raise Conflict(
            f"Collection {collection!r} has another generation besides the live one, which would lack the imported "
            f"rows. Wait for its re-index, or see `vectormill collections discard {collection} GENERATION`."
        )
    if live.spec.result != VECTOR:
        raise SpecMismatch(
            f"Vectors can be imported only into a collection of dense vectors, and {collection!r} has others."
        )
    remembers = connection.execute(REMEMBERS_DELETIONS, {"collection_id": live.collection_id})
    if not again and not remembers.scalar_one():
        raise Conflict(
            f"Collection {collection!r} is older than a day and has forgotten which keys were deleted from it: those "
            "that the source still has would come back. Remove them from the source, and pass --again."
        )
    return live


def check_vectors(items: Items, vectors: npt.NDArray[np.float32], spec: EncodingSpec) -> None:
    """Raise SpecMismatch, which names a row, if a vector [n, dimensions] cannot be one of this spec."""
    if vectors.shape[1] != spec.dimensions and len(vectors):
        raise SpecMismatch(
            f"The vectors have {vectors.shape[1]} dimensions, and those of {spec.model} with these options have "
            f"{spec.dimensions}."
        )
    norms = np.linalg.norm(vectors, axis=1)
    too_large, is_zero = find_unfit(vectors, spec.kept_type)
    for wrong, reason in (
        (too_large, "has NaN, infinity or a value that is too large"),
        (is_zero, "is zero, at least in the collection's vector type"),
        (
            spec.normalize & (np.abs(norms - 1) > NORM_TOLERANCE),
            "does not have length 1; state --no-normalize",
        ),
    ):
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            raise SpecMismatch(
                f"The vector of the row {items.keys[place]!r} {reason} (length {norms[place]:.4g})."
            )


def import_rows(
    connection: Connection,
    collection: str,
    spec: EncodingSpec,
    items: Items,
    vectors: npt.NDArray[np.float32],
    *,
    again: bool = False,
) -> int:
    """Write the rows whose keys are new, inside the caller's transaction, and return their number.

    Raise the errors of `find_import_target` and `check_vectors`.
    """
    generation = find_import_target(connection, collection, again=again)
    if generation.spec.fingerprint() != spec.fingerprint():
        raise Conflict(f"Collection {collection!r} was changed to another model during the import.")
    check_vectors(items, vectors, spec)
    values: dict[str, Any] = {"keys": list(items.keys), "collection_id": generation.collection_id}
    statement = text(LIST_KNOWN_KEYS.format(table=generation.table_name))
    known = set(connection.execute(statement, values).scalars())
    places = [place for place, key in enumerate(items.keys) if key not in known]
    kind = spec.kept_type
    ranges = find_ranges(connection, spec)
    if kind.has_ranges and ranges is None:
        raise Conflict(
            f"The ranges of {kind.name} codes of this model are not measured yet: put one text into the collection "
            "first."
        )
    keep_text = keeps_texts(connection, generation.collection_id)
    rows = make_column_rows(vectors[places], kind, ranges)
    num_repeated = upsert_rows(
        connection, generation.id, IMPORTED_PLACE, items.take(places), rows, spec, keep_text=keep_text
    )
    return len(places) - num_repeated
