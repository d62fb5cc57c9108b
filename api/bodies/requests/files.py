"""Files as OpenAI's interface answers them."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from vectormill.domain.requests.request_file import PURPOSES, RequestFile

LARGEST_PAGE = 10_000

FILE_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "Lines of JSON, each a request of a batch. Read as a stream.",
                        },
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": 1,
                            "maximum": 315_360_000,
                            "description": "So long the file is kept; else VECTORMILL_FILE_RETENTION_DAYS.",
                        },
                    },
                }
            }
        },
    }
}


class FileBody(BaseModel):
    """A file, in the same shape wherever it is answered."""

    id: str = Field(examples=["file-0123456789abcdef0123456789abcdef"])
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = Field(description="In seconds since 1970, as all times here.")
    expires_at: int | None = Field(description="When it will be removed; null: never by itself.")
    filename: str
    purpose: str = Field(json_schema_extra={"enum": list(PURPOSES)})
    status: Literal["processed"] = "processed"
    status_details: str | None = None

    @classmethod
    def from_file(cls, file: RequestFile) -> Self:
        return cls(
            id=file.name,
            bytes=file.num_bytes,
            created_at=int(file.created_at.timestamp()),
            expires_at=None if file.expires_at is None else int(file.expires_at.timestamp()),
            filename=file.filename,
            purpose=file.purpose,
        )


class FilePage(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileBody]
    first_id: str | None
    last_id: str | None = Field(description="Hand it back as `after` while `has_more` is true.")
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class FileFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    purpose: str | None = Field(default=None, json_schema_extra={"enum": [*PURPOSES, None]})
    limit: int = Field(default=LARGEST_PAGE, ge=1, le=LARGEST_PAGE)
    order: Annotated[Literal["asc", "desc"], Field(description="By the time of creation.")] = "desc"
    after: str | None = Field(default=None, description="The id of the last file of the page before.")
