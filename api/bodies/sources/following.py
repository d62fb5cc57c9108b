"""Bodies that name the table which a collection follows."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from vectormill.sources.followed_tables import Following


class FollowRequest(BaseModel):
    """Without names, table and column are those that the source's query takes its keys from."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"table": "public.papers", "key_column": "id"}}
    )

    table: str | None = Field(default=None, max_length=200, description="As SQL writes it, with its schema.")
    key_column: str | None = Field(
        default=None, max_length=63, description="Whose values are the keys, or those of the documents."
    )


class FollowingBody(BaseModel):
    """The table that a collection follows, and how far behind it is."""

    collection: str
    table: str | None = Field(description="Null when it follows none.")
    key_column: str | None
    waiting_changes: int = Field(description="That are not yet submitted; at most 1,000 are counted.")
    lag_seconds: float = Field(description="Since the oldest of them; 0 when none waits.")

    @classmethod
    def of(cls, collection: str, following: Following) -> Self:
        table = following.table
        return cls(
            collection=collection,
            table=None if table is None else str(table),
            key_column=None if table is None else table.key_column,
            waiting_changes=following.num_waiting,
            lag_seconds=following.oldest_seconds,
        )
