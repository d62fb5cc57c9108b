"""Embeddings as OpenAI's clients ask for them, and what all routes of vectors share: a worker encodes the texts of a
request by a message while somebody waits. No number is written by Python.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute

from api.dependencies import Resources, ResourcesDependency
from api.door.media_types import JSON_TYPE, require_json
from api.intake.requests import decode_body
from api.intake.submissions import read_body
from api.limits.gates import Hold
from api.openai.errors import name_parameter
from api.problems import Place, Problem
from api.queries import Answered
from api.serving import serve
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
from vectormill.domain.task import has_token_ids
from vectormill.jobs.item import find_text_failure
from vectormill.models.registry import Registry
from vectormill.vectors.decimals import write_decimals

T = TypeVar("T")

# A body of so many bytes is read, and vectors of so many are written, in a tenth of a millisecond.
SMALL_BYTES: Final = 32 << 10
SMALL_VECTORS: Final = 64 << 10


async def read_wanted(
    request: Request, resources: Resources, hold: Hold, read: Callable[[bytes, Resources], T]
) -> T:
    """Read the body with `read`, which may wait for a hub, on a thread. Raises Problem and the errors of `read`."""
    require_json(request)
    return await run_in_threadpool(read, await read_body(request, resources.settings, hold), resources)


async def read_at_once(
    request: Request, resources: Resources, hold: Hold, read: Callable[[bytes, Resources], T]
) -> T:
    """Read a small body with a `read` that waits for nobody, in the event loop."""
    require_json(request)
    body = await read_body(request, resources.settings, hold)
    if len(body) <= SMALL_BYTES:
        return read(body, resources)
    return await run_in_threadpool(read, body, resources)


async def embed(
    resources: Resources,
    hold: Hold,
    encoding: EncodingRequest,
    texts: Sequence[bytes],
    field: str,
    *,
    is_list: bool = True,
) -> Answered:
    """Return the vectors of the texts of a field, with the numbers of tokens that were read.

    Raises Problem for a text that has no vector, and the errors of find_spec and QueryExchange.answer.
    """
    spec = await find_spec(resources.registry, encoding)
    num_bytes = 4 * spec.dimensions * len(texts)
    if num_bytes > SMALL_VECTORS:
        # The vectors and the answer made of them are five times as much; a byte of JSON is held for 16.
        hold.take(num_bytes * 5 // 16)
    answered = await resources.queries.answer(spec, texts)
    for row, reason in answered.failures.items():
        raise refuse_text(f"/{field}/{row}" if is_list else f"/{field}", reason)
    return answered


async def find_spec(registry: Registry, encoding: EncodingRequest) -> EncodingSpec:
    """Return the requested spec, read in a thread where that may wait for a hub. Raises as resolve_spec."""
    if registry.is_read(encoding.model):
        return resolve_spec(registry, encoding)
    return await run_in_threadpool(resolve_spec, registry, encoding)


async def write(answered: Answered, work: Callable[[], bytes]) -> Response:
    """Respond with what `work` writes as JSON, in a thread where it is large enough to hold up other requests."""
    is_small = answered.vectors.nbytes <= SMALL_VECTORS
    content = work() if is_small else await run_in_threadpool(work)
    return Response(content, media_type=JSON_TYPE)


def read_texts(texts: Sequence[str], field: str, resources: Resources) -> list[bytes]:
    """Return the texts in UTF-8. Raises Problem for the first that can have no vector."""
    encoded = list(map(write_input, texts))
    for number, text in enumerate(encoded):
        check_text(text, resources.settings.max_text_chars, f"/{field}/{number}")
    return encoded


def check_text(text: bytes, max_chars: int, pointer: str) -> None:
    """Raise Problem for a text that can have no vector. `pointer` says where it stands in the body."""
    failure = find_text_failure(text, max_chars)
    if failure is not None:
        raise refuse_text(pointer, failure.detail)


def refuse_text(pointer: str, reason: str) -> Problem:
    detail = f"{name_parameter(pointer)} cannot be encoded: {reason}."
    return Problem(422, InvalidItem.code, detail, errors=[Place(reason, pointer=pointer)])


class EmbeddingsRoute(APIRoute):
    """A route without FastAPI's part: that took longer than all that is done here, as with searches."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return answer_embeddings


async def answer_embeddings(request: Request) -> Response:
    """Answer embeddings, as `post_embeddings` describes."""
    return await post_embeddings(request, request.app.state.resources)


router = APIRouter(tags=["openai"], route_class=EmbeddingsRoute)


@serve(router, EMBED)
async def post_embeddings(request: Request, resources: ResourcesDependency) -> Response:
    """Return the vectors of some texts, in the shapes of OpenAI's API; docs/OPENAI.md says what differs."""
    with resources.gates.json_bytes.hold() as hold:
        wanted, texts = await read_at_once(request, resources, hold, read_request)
        with resources.gates.searches.enter():  # not before: a body may come slowly
            answered = await embed(
                resources, hold, wanted.encoding(), texts, "input", is_list=wanted.has_list
            )
            return await write(answered, lambda: write_answer(wanted, answered))


def read_request(body: bytes, resources: Resources) -> tuple[EmbeddingsRequest, list[bytes]]:
    """Return the request and its texts. Raises Problem and InvalidOption."""
    wanted = decode_body(body, EMBEDDINGS_DECODER)
    return wanted, read_checked_inputs(wanted, resources.settings.max_text_chars)


def read_checked_inputs(request: EmbeddingsRequest, max_chars: int) -> list[bytes]:
    """Return the inputs as read_inputs does, all texts checked. Raises Problem and InvalidOption."""
    texts = read_inputs(request)
    for number, text in enumerate(texts):
        if not has_token_ids(text):
            check_text(text, max_chars, f"/input/{number}" if request.has_list else "/input")
    return texts


class Usage(msgspec.Struct):
    """Numbers of tokens that the model read."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int


class EncodedEmbedding(msgspec.Struct):
    """A row as bytes, which msgspec writes as base64."""

    index: int
    embedding: bytes | msgspec.Raw
    object: str = "embedding"


class EncodedAnswer(msgspec.Struct):
    """The answer as it is written, its fields in OpenAI's order but for `object`, which is the same in all."""

    data: list[EncodedEmbedding]
    model: str
    usage: Usage
    object: str = "list"


ENCODER: Final = msgspec.json.Encoder()


def write_answer(request: EmbeddingsRequest, answered: Answered) -> bytes:
    """Write the answer as JSON."""
    rows: list[Any]
    if request.encoding_format == BASE64:
        rows = [row.tobytes() for row in answered.vectors.astype("<f4", copy=False)]
    else:
        rows = [msgspec.Raw(b"[" + row.tobytes()) for row in write_decimals(answered.vectors)]
    return ENCODER.encode(
        EncodedAnswer(
            [EncodedEmbedding(index, row) for index, row in enumerate(rows)],
            request.model,
            Usage(answered.num_tokens, answered.num_tokens, answered.num_truncated),
        )
    )
