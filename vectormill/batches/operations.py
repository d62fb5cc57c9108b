"""The API's operations on request batches and their files, and the two whose requests a batch can have."""

from typing import Final

from vectormill.batches.bodies import (
    EXAMPLE_FILE,
    FILE_FORM,
    BatchBody,
    BatchPage,
    BatchQuery,
    BatchRequest,
    DeletedFile,
    FileBody,
    FilePage,
    FileQuery,
)
from vectormill.batches.endpoints import (
    EmbeddingsAnswer,
    EmbeddingsRequest,
    RerankAnswer,
    RerankRequest,
    VoyageRerankAnswer,
)
from vectormill.keys.api_key import READ, WRITE
from vectormill.operation import Operation

FILE: Final = "/v1/files/{file_id}"
BATCH: Final = "/v1/batches/{batch_id}"

UPLOAD: Final = Operation("POST", "/v1/files", WRITE, FileBody, form=FILE_FORM)
LIST_FILES: Final = Operation("GET", "/v1/files", READ, FilePage, query=FileQuery)
SHOW_FILE: Final = Operation("GET", FILE, READ, FileBody)
READ_FILE: Final = Operation("GET", FILE + "/content", READ, bytes, media_types=("application/octet-stream",))
# OpenAI's clients cannot confirm it. Ids of files cannot be guessed.
DELETE_FILE: Final = Operation("DELETE", FILE, WRITE, DeletedFile, skips_confirmation=True)

CREATE: Final = Operation(
    "POST", "/v1/batches", WRITE, BatchBody, BatchRequest,
    example={"input_file_id": EXAMPLE_FILE, "endpoint": "/v1/embeddings", "completion_window": "24h"},
)  # fmt: skip
LIST: Final = Operation("GET", "/v1/batches", READ, BatchPage, query=BatchQuery)
SHOW: Final = Operation("GET", BATCH, READ, BatchBody)
CANCEL: Final = Operation("POST", BATCH + "/cancel", WRITE, BatchBody)

# A client does not retry these when no answer came, since the server itself waits for a worker.
EMBED: Final = Operation(
    "POST", "/v1/embeddings", READ, EmbeddingsAnswer, EmbeddingsRequest,
    example={"input": ["dates", "times"], "encoding_format": "base64"}, is_repeatable=False,
)  # fmt: skip
RERANK: Final = Operation(
    "POST", "/v1/rerank", READ, RerankAnswer, RerankRequest, other_answer=VoyageRerankAnswer, is_repeatable=False,
    example={
        "query": "how to parse a date",
        "documents": ["datetime.strptime reads a date.", "zlib compresses bytes."],
        "top_n": 1,
    },
)  # fmt: skip
