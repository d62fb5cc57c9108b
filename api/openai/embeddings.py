"""OpenAI's /v1/embeddings, and what it shares with all routes that encode texts while the client waits.

The texts of a request are sent to a worker as a message. Numbers are formatted in bulk, never by Python
itself.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.dependencies import Resources, ResourcesDependency
from api.door.media_types import JSON_TYPE, require_json
from api.intake.requests import decode_body
from api.intake.submissions import read_body
from api.limits.gates import Hold
from api.openai.errors import name_parameter
from api.problems import Problem, refuse
from api.queries import Answered
from api.serving import serve
from api.streams.result_columns import write_representations
from vectormill.batches.endpoints import (
    BASE64,
    EMBEDDINGS_DECODER,
    EmbeddingsRequest,
    EncodingRequest,
    read_inputs,
    resolve_spec,
    write_input,
)
from vectormill.batches.operations import EMBED
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidItem
from vectormill.domain.task import REPRESENTATIONS, has_token_ids
from vectormill.jobs.item import find_text_failure
from vectormill.models.registry import Registry
from vectormill.vectors.decimals import write_decimals
from vectormill.vectors.representations import Representations

T = TypeVar("T")

# Reading a body or writing vectors of at most this size takes a tenth of a millisecond.
SMALL_BYTES: Final = 32 << 10
SMALL_VECTORS: Final = 64 << 10


@asynccontextmanager
async def receiving(
    request: Request, resources: Resources, read: Callable[[bytes, Resources], T], *, is_quick: bool = False
) -> AsyncIterator[tuple[Hold, T]]:
    """Read the body, parse it with `read`, and count the block, which answers it, as a search.

    `read` runs on a thread, since it may wait for a model hub, and in the event loop if it `is_quick` and the body
    small. Raise Problem and the errors of `read`.
    """
    with resources.gates.json_bytes.hold() as hold:
        require_json(request)
        body = await read_body(request, resources.settings, hold)
        is_here = is_quick and len(body) <= SMALL_BYTES
        wanted = read(body, resources) if is_here else await run_in_threadpool(read, body, resources)
        with resources.gates.searches.enter():  # after the body, which may arrive slowly
            yield hold, wanted


async def embed(
    resources: Resources,
    hold: Hold,
    encoding: EncodingRequest,
    texts: Sequence[bytes],
    field: str,
    *,
    is_list: bool = True,
) -> Answered:
    """Return the vectors and the token counts of the texts of a field.

    `field` names the field in errors. Raise Problem for a text that cannot be encoded, and the errors of
    find_spec and QueryExchange.answer.
    """
    spec = await find_spec(resources.registry, encoding)
    num_bytes = measure_results(spec, texts)
    if num_bytes > SMALL_VECTORS:
        # The vectors and the answer made from them take five times num_bytes, while the gate counts a byte of
        # JSON for each 16 bytes of memory.
        hold.take(num_bytes * 5 // 16)
    answered = await resources.queries.answer(spec, texts)
    for row, reason in enumerate(answered.failures):
        if reason is not None:
            raise refuse_text(f"/{field}/{row}" if is_list else f"/{field}", reason)
    return answered


# A text has hardly more weights than this; a model that has would need more memory than is counted.
MOST_WEIGHTS: Final = 512


def measure_results(spec: EncodingSpec, texts: Sequence[bytes]) -> int:
    """Return about how many bytes the results of texts take; a token is counted for each byte of a short text."""
    num_bytes = (4 * spec.dimensions + 8 * min(spec.sparse_dimensions, MOST_WEIGHTS)) * len(texts)
    if spec.token_dimensions:
        num_bytes += 2 * spec.token_dimensions * sum(min(len(text), spec.max_tokens) for text in texts)
    return num_bytes


async def find_spec(registry: Registry, encoding: EncodingRequest) -> EncodingSpec:
    """Return the requested spec, on a thread if that may wait for a model hub.

    Raise the errors of resolve_spec.
    """
    if registry.is_read(encoding.model):
        return resolve_spec(registry, encoding)
    return await run_in_threadpool(resolve_spec, registry, encoding)


async def write(answered: Answered, work: Callable[[], bytes]) -> Response:
    """Return a JSON response with the bytes that `work` returns; a large answer is written on a thread."""
    is_small = answered.vectors.dtype != np.object_ and answered.vectors.nbytes <= SMALL_VECTORS
    content = work() if is_small else await run_in_threadpool(work)
    return Response(content, media_type=JSON_TYPE)


def read_texts(texts: Sequence[str], field: str, resources: Resources) -> list[bytes]:
    """Return the texts in UTF-8. Raise Problem for the first one that cannot be encoded."""
    encoded = list(map(write_input, texts))
    for number, text in enumerate(encoded):
        check_text(text, resources.settings.max_text_chars, f"/{field}/{number}")
    return encoded


def check_text(text: bytes, max_chars: int, pointer: str) -> None:
    """Raise Problem if a text cannot be encoded. `pointer` is the text's JSON pointer in the body."""
    failure = find_text_failure(text, max_chars)
    if failure is not None:
        raise refuse_text(pointer, failure.detail)


def refuse_text(pointer: str, reason: str) -> Problem:
    detail = f"{name_parameter(pointer)} cannot be encoded: {reason}."
    return refuse(reason, code=InvalidItem.code, detail=detail, pointer=pointer)


router = APIRouter(tags=["openai"])


@serve(router, EMBED)
async def post_embeddings(request: Request, resources: ResourcesDependency) -> Response:
    """Return the vectors of texts in the format of OpenAI's API; docs/OPENAI.md lists the differences."""
    async with receiving(request, resources, read_request, is_quick=True) as (hold, (wanted, texts)):
        encoding = wanted.encoding()
        answered = await embed(resources, hold, encoding, texts, "input", is_list=wanted.has_list)
        spec = await find_spec(resources.registry, encoding)
        return await write(answered, lambda: write_answer(wanted, answered, spec))


def read_request(body: bytes, resources: Resources) -> tuple[EmbeddingsRequest, list[bytes]]:
    """Return the decoded request and its checked inputs. Raise Problem and InvalidOption."""
    wanted = decode_body(body, EMBEDDINGS_DECODER)
    return wanted, read_checked_inputs(wanted, resources.settings.max_text_chars)


def read_checked_inputs(request: EmbeddingsRequest, max_chars: int) -> list[bytes]:
    """Return the inputs as read_inputs does, after checking all texts.

    Raise Problem and InvalidOption.
    """
    texts = read_inputs(request)
    for number, text in enumerate(texts):
        if not has_token_ids(text):
            check_text(text, max_chars, f"/input/{number}" if request.has_list else "/input")
    return texts


def write_outputs(row: Representations, spec: EncodingSpec, *, is_packed: bool) -> dict[str, Any]:
    """Return the outputs of one text by name, with the dense vector as bytes if `is_packed`."""
    outputs: dict[str, Any] = msgspec.json.decode(
        b"{" + b"".join(write_representations(row, spec))[1:] + b"}", type=dict[str, msgspec.Raw]
    )
    if is_packed and "embedding" in outputs:
        outputs["embedding"] = row.dense.astype("<f4").tobytes()
    return outputs


def write_answer(request: EmbeddingsRequest, answered: Answered, spec: EncodingSpec) -> bytes:
    """Return the JSON answer to a request for embeddings. In it bytes become base64, and Raw is JSON already."""
    rows: Iterable[dict[str, Any]]
    is_packed = request.encoding_format == BASE64
    if spec.result == REPRESENTATIONS:
        rows = (write_outputs(row, spec, is_packed=is_packed) for row in answered.vectors)
    elif is_packed:
        rows = ({"embedding": row.tobytes()} for row in answered.vectors.astype("<f4", copy=False))
    else:
        rows = ({"embedding": msgspec.Raw(b"[" + row.tobytes())} for row in write_decimals(answered.vectors))
    data = [{"object": "embedding", "index": index, **row} for index, row in enumerate(rows)]
    usage = {
        "prompt_tokens": answered.num_tokens,
        "total_tokens": answered.num_tokens,
        "truncated_inputs": int(answered.is_truncated.sum()),
    }
    return msgspec.json.encode({"object": "list", "data": data, "model": request.model, "usage": usage})
