"""Items of a collection as clients send and get them, one by one."""

from datetime import UTC, datetime
from typing import Annotated, Any, Self
from uuid import UUID

import msgspec
from msgspec import Meta
from pydantic import BaseModel, Field

from api.streams.result_columns import RESULT_COLUMNS
from vectormill.collections.rows.items import KeptItem
from vectormill.collections.rows.puts import PutEnd
from vectormill.domain.task import TASKS
from vectormill.search.bodies import PassageBody, find_passage


class PutRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of a put: what a collection is to have under the key of the path."""

    text: Annotated[str, Meta(examples=["A text to encode."])]
    text_pair: Annotated[
        str | None, Meta(description="Text that `text` is compared with, in a collection of scores.")
    ] = None
    metadata: Annotated[
        dict[str, Any] | None, Meta(description="Kept beside the result.", examples=[{"page": 1}])
    ] = None


class DeleteRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of a deletion of many items."""

    keys: Annotated[list[str], Meta(examples=[["a", "b"]])]


class PutAnswer(BaseModel):
    """The outcome of a put."""

    key: str
    job: UUID = Field(description="Its job; of a put that was waited for it is removed soon.")
    is_searchable: bool = Field(description="True if searches find it already; otherwise see its job.")
    searchable_at: datetime | None = Field(description="Since when; null while it is not.")

    @classmethod
    def of(cls, key: str, job_id: UUID, end: PutEnd | None) -> Self:
        moment = end.finished_at.astimezone(UTC) if end is not None and end.finished_at is not None else None
        return cls(key=key, job=job_id, is_searchable=end is not None, searchable_at=moment)


class DeleteAnswer(BaseModel):
    """The outcome of a deletion."""

    num_keys: int = Field(description="Keys that were named, each once.")
    num_deleted: int = Field(description="Those that the collection had.")


class ItemAnswer(BaseModel):
    """An item of a collection, with the result fields of the collection's kind."""

    key: str
    text: str | None = Field(description="Null unless the collection keeps texts.")
    text_pair: str | None = Field(default=None, description="Second text of a pair that is kept.")
    metadata: dict[str, Any] | None
    document: str | None = Field(description="The key of the document that it is a passage of.")
    passage: PassageBody | None
    content_hash: str = Field(
        description="16 bytes that change with the text (BLAKE2b), in hexadecimal digits."
    )
    job_seq: int = Field(description="The place of the job that wrote it among all writers.")
    embedding: list[float] | None = Field(
        default=None,
        description="In the numbers of the collection's vector type; asked for by `include=vector`.",
    )
    score: float | None = Field(default=None, description="The score, in a collection of scores.")
    label: str | None = Field(default=None, description="The score's; null of a model with one number.")
    probabilities: dict[str, float] | None = Field(default=None, description="The number of each label.")
    output: dict[str, Any] | None = Field(
        default=None,
        description="Records found in the item by their first type, in a collection of records.",
    )

    @classmethod
    def from_item(cls, item: KeptItem) -> Self:
        document, passage = find_passage(item.metadata or {})
        return cls(
            key=item.key,
            text=item.text,
            metadata=item.metadata,
            document=document,
            passage=passage,
            content_hash=item.content_hash.hex(),
            job_seq=item.job_seq,
            **describe_result(item),
        )


def describe_result(item: KeptItem) -> dict[str, Any]:
    """The fields of an item that are its kind's."""
    pair = {"text_pair": item.text_pair} if TASKS[item.spec.task].reads_pairs else {}
    if item.results is None:
        return {"embedding": None, **pair}
    return {**RESULT_COLUMNS[item.spec.result].describe(item.results, item.spec), **pair}
