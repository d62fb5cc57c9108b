"""What the API answers when another generation becomes the live one."""

from typing import Any, Self

from pydantic import BaseModel, Field

from api.schemas import describe_spec
from vectormill.db.collections.swaps import Swap
from vectormill.domain.collection import Generation


class GenerationBody(BaseModel):
    """One generation, by what tells it from another."""

    id: int
    fingerprint: str
    options: dict[str, Any] = Field(description="Its EncodingSpec.")

    @classmethod
    def from_generation(cls, generation: Generation) -> Self:
        spec = generation.spec
        return cls(id=generation.id, fingerprint=spec.fingerprint(), options=describe_spec(spec))


class RollbackAnswer(BaseModel):
    """What a rollback has changed."""

    collection: str
    live: GenerationBody
    retired: GenerationBody
    num_newer_rows: int | None = Field(
        description="Rows that were put since the retired one became live, and are missing now; null if counting them "
        "took too long. The next re-index brings those that the source has."
    )

    @classmethod
    def from_swap(cls, swap: Swap, num_newer_rows: int | None) -> Self:
        return cls(
            collection=swap.live.collection,
            live=GenerationBody.from_generation(swap.live),
            retired=GenerationBody.from_generation(swap.retired),
            num_newer_rows=num_newer_rows,
        )
