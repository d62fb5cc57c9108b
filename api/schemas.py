"""Problems as the API answers them (RFC 9457)."""

from pydantic import BaseModel, ConfigDict, Field


class PlaceBody(BaseModel):
    detail: str
    pointer: str | None = None
    line: int | None = None
    parameter: str | None = None
    header: str | None = None
    code: str | None = None


class LimitBody(BaseModel):
    setting: str
    value: float


class OpenAIErrorBody(BaseModel):
    """A refusal as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ProblemBody(BaseModel):
    """Problem details (RFC 9457); `type` is stable, `errors` names the places, `limit` the setting that was reached."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "https://vectormill.dev/problems/invalid-item",
                "title": "Invalid item",
                "status": 422,
                "detail": "Line 17: Object missing required field `text`.",
                "instance": "/v1/jobs",
                "errors": [{"detail": "Object missing required field `text`", "line": 17}],
            }
        }
    )

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[PlaceBody] = Field(default_factory=list)
    limit: LimitBody | None = None
    error: OpenAIErrorBody | str | None = Field(
        default=None,
        description="The error in the shape of OpenAI's or text-embeddings-inference's clients, on their routes.",
    )
    error_type: str | None = Field(default=None, description="Beside it, for the latter.")
    message: str | None = Field(
        default=None, description="The error in the shape of Cohere's clients, on their routes."
    )
