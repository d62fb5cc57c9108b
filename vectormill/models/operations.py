"""Operations on models, with what they answer."""

from typing import Annotated, Final, Literal, TypedDict

from msgspec import Meta

from vectormill.keys.api_key import READ
from vectormill.operation import Operation


class ModelBody(TypedDict):
    """A registered model. Its card's fields are null when its files cannot be read; `problem` says why."""

    id: Annotated[str, Meta(description="Its name, under the field that OpenAI's clients read.")]
    object: Literal["model"]
    created: Annotated[
        int, Meta(description="When its files were stored on this machine, in seconds since 1970.")
    ]
    owned_by: Literal["vectormill"]
    name: str
    task: Annotated[str | None, Meta(description="Default task of a job with this model.")]
    dimension: Annotated[
        int | None, Meta(description="Length of a vector; for scores the number of labels, for records 0.")
    ]
    outputs: Annotated[
        list[str] | None,
        Meta(description="What an embedding model can compute (`outputs`), the usual one first."),
    ]
    max_tokens: int | None
    pooling: str | None
    normalize: bool | None
    prompts: dict[str, str]
    revision: str | None
    workers: Annotated[int, Meta(description="Live workers that serve this model.")]
    problem: str | None
    notes: Annotated[
        list[str], Meta(description="Notes on how the model is used differently from what its files say.")
    ]
    settings: Annotated[
        list[str], Meta(description="What the model's files say of how it is used, each with its file.")
    ]
    unprompted: Annotated[
        str | None, Meta(description="The note that applies only to jobs without a prompt.")
    ]


class ModelList(TypedDict):
    """All registered models."""

    object: Literal["list"]
    data: list[ModelBody]


LIST: Final = Operation("GET", "/v1/models", READ, ModelList)
# A name may have slashes.
SHOW: Final = Operation("GET", "/v1/models/{name:path}", READ, ModelBody)
