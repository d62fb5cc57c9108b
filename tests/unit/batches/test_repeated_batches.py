"""Tests of the fields that a repeated request for a batch must have in common with the first one."""

from dataclasses import dataclass
from uuid import UUID

from vectormill.batches.batches import describe_content
from vectormill.batches.request_batch import EMBEDDINGS, NewRequestBatch

FILE_ID = UUID(int=7)


@dataclass(frozen=True, slots=True)
class LaterBatch(NewRequestBatch):
    """A batch of a later release, which has a field more."""

    priority: int = 5


def test_a_field_that_is_added_later_makes_no_earlier_key_invalid() -> None:
    batch = NewRequestBatch(EMBEDDINGS, FILE_ID, "24h", {"b": "2", "a": "1"})
    written = f'["{EMBEDDINGS}","{FILE_ID.hex}","24h",[["a","1"],["b","2"]],null]'
    assert describe_content(batch) == written
    assert describe_content(LaterBatch(EMBEDDINGS, FILE_ID, "24h", {"a": "1", "b": "2"})) == written
    assert describe_content(LaterBatch(EMBEDDINGS, FILE_ID, "24h", priority=1)) != describe_content(
        NewRequestBatch(EMBEDDINGS, FILE_ID, "24h")
    )


def test_the_key_of_a_request_is_no_part_of_its_content() -> None:
    contents = {
        describe_content(NewRequestBatch(EMBEDDINGS, FILE_ID, "24h", idempotency_key=key))
        for key in ("a", None)
    }
    assert len(contents) == 1
