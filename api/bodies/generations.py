"""Answers about switching the live generation."""

from typing import Any, Self
from uuid import UUID

from pydantic import BaseModel, Field

from vectormill.collections.collection import Generation
from vectormill.collections.swaps import NewerRows, Rollback


class LiveGenerationBody(BaseModel):
    """One generation, by what tells it from another."""

    id: int
    fingerprint: str
    options: dict[str, Any] = Field(description="Its EncodingSpec.")

    @classmethod
    def from_generation(cls, generation: Generation) -> Self:
        spec = generation.spec
        return cls(id=generation.id, fingerprint=spec.fingerprint(), options=spec.describe())


class RollbackAnswer(BaseModel):
    """The changes that a rollback made."""

    collection: str
    live: LiveGenerationBody
    retired: LiveGenerationBody
    num_newer_rows: int | None = Field(
        description="Rows that were put since the retired one became live, which the run carries over; null if "
        "counting them took too long."
    )
    num_missing_rows: int | None = Field(
        description="Rows among these without a kept text: they are missing where no job has their text any more."
    )
    run_id: UUID = Field(description="The run that encodes newer rows for the generation that is live again.")

    @classmethod
    def from_rollback(cls, swap: Rollback, newer: NewerRows | None) -> Self:
        return cls(
            collection=swap.live.collection,
            live=LiveGenerationBody.from_generation(swap.live),
            retired=LiveGenerationBody.from_generation(swap.retired),
            num_newer_rows=newer.num_rows if newer else None,
            num_missing_rows=newer.num_missing if newer else None,
            run_id=swap.run_id,
        )
