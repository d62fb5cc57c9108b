"""Errors in the formats of OpenAI, text-embeddings-inference and Cohere, chosen by the path of the request.

Problem details may have further members (RFC 9457, section 3.2), so one body serves their clients and ours.
Independent of routes and bodies.
"""

from collections.abc import Callable
from typing import Any, Final

# Paths of OpenAI's clients; paths below them count too. A new route for these clients is added here.
OPENAI_PATHS: Final = ("/v1/embeddings", "/v1/models", "/v1/files", "/v1/batches")
# The paths of text-embeddings-inference and of Cohere.
TEI_PATHS: Final = ("/", "/embed", "/similarity", "/predict", "/rerank", "/info")
COHERE_PATHS: Final = ("/v1/embed", "/v2/embed", "/v2/rerank")

# These clients choose the exception by status: 400 is BadRequestError, 404 NotFoundError; few know 422.
BAD_REQUEST: Final = 400
STATUS_BY_STATUS: Final = {422: BAD_REQUEST}
STATUS_BY_CODE: Final = {"unknown-model": 404}
# Codes that programs compare with. Every other code is ours, with underscores as in OpenAI's codes.
CODES: Final = {
    "unknown-model": "model_not_found",
    "key-missing": "invalid_api_key",
    "key-unknown": "invalid_api_key",
    "limit-reached": "rate_limit_exceeded",
}
PARAMETERS: Final = {"unknown-model": "model"}


def tell_refusal(
    path: str, status: int, code: str, detail: str, parameter: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the status and the further members of an error that the clients of this path expect.

    `parameter` is the field that caused the error.
    """
    for paths, tell in TELLERS:
        if any(path == prefix or path.startswith(f"{prefix}/") for prefix in paths):
            status = STATUS_BY_CODE.get(code, STATUS_BY_STATUS.get(status, status))
            return status, tell(status, code, detail, parameter)
    return status, {}


def describe_refusal(status: int, code: str, detail: str, parameter: str | None) -> dict[str, Any]:
    """Return the member `error` in OpenAI's format."""
    error = {
        "message": detail,
        "type": name_type(status),
        "param": parameter or PARAMETERS.get(code),
        "code": CODES.get(code, code.replace("-", "_")),
    }
    return {"error": error}


def describe_for_tei(status: int, code: str, detail: str, parameter: str | None) -> dict[str, Any]:
    if status == 429:
        kind = "Overloaded"
    else:
        kind = "Backend" if status >= 500 else "Validation"
    return {"error": detail, "error_type": kind}


def name_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def name_parameter(pointer: str) -> str:
    """Return the name of the field at a JSON pointer: "input[3]" for "/input/3"."""
    first, *rest = pointer.strip("/").split("/")
    return first + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in rest)


Tell = Callable[[int, str, str, str | None], dict[str, Any]]
TELLERS: Final[tuple[tuple[tuple[str, ...], Tell], ...]] = (
    (OPENAI_PATHS, describe_refusal),
    (TEI_PATHS, describe_for_tei),
    (COHERE_PATHS, lambda status, code, detail, parameter: {"message": detail}),
)
