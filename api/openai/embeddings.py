"""OpenAI's /v1/embeddings, and what it shares with all routes that encode texts while the client waits.

The texts of a request are sent to a worker as a message. Numbers are formatted in bulk, never by Python
itself.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response

from api.dependencies import Resources, ResourcesDependency
from api.door.media_types import JSON_TYPE
from api.intake.bodies import receiving, run
from api.intake.requests import check_text, decode_body, locate
from api.limits.gates import Hold
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
from vectormill.domain.task import REPRESENTATIONS, has_token_ids
from vectormill.models.registry import Registry
from vectormill.vectors.decimals import write_decimals
from vectormill.vectors.representations import Representations

# Writing vectors of at most this size takes a tenth of a millisecond.
SMALL_VECTORS: Final = 64 << 10


async def embed(
    resources: Resources, hold: Hold, encoding: EncodingRequest, texts: Mapping[str, bytes]
) -> Answered:
    """Return the vectors and the token counts of texts, which are named by their JSON pointers in the body.

    Raise the errors of find_spec and QueryExchange.answer.
    """
    spec = await find_spec(resources.registry, encoding)
    num_bytes = measure_results(spec, texts.values())
    if num_bytes > SMALL_VECTORS:
        # The vectors and the answer made from them take five times num_bytes, while the gate counts a byte of
        # JSON for each 16 bytes of memory.
        hold.take(num_bytes * 5 // 16)
    return await resources.queries.answer(spec, texts)


# A text has hardly more weights than this; a model that has would need more memory than is counted.
MOST_WEIGHTS: Final = 512


def measure_results(spec: EncodingSpec, texts: Collection[bytes]) -> int:
    """Return about how many bytes the results of texts take; a token is counted for each byte of a short text."""
    num_bytes = (4 * spec.dimensions + 8 * min(spec.sparse_dimensions, MOST_WEIGHTS)) * len(texts)
    if spec.token_dimensions:
        num_bytes += 2 * spec.token_dimensions * sum(min(len(text), spec.max_tokens) for text in texts)
    return num_bytes


async def find_spec(registry: Registry, encoding: EncodingRequest) -> EncodingSpec:
    """Return the requested spec, on a thread if that may wait for a model hub.

    Raise the errors of resolve_spec.
    """
    return await run(registry.is_read(encoding.model), resolve_spec, registry, encoding)


async def write(answered: Answered, work: Callable[[], bytes]) -> Response:
    """Return a JSON response with the bytes that `work` returns; a large answer is written on a thread."""
    is_small = answered.vectors.dtype != np.object_ and answered.vectors.nbytes <= SMALL_VECTORS
    return Response(await run(is_small, work), media_type=JSON_TYPE)


def read_texts(texts: Sequence[str], field: str, resources: Resources) -> dict[str, bytes]:
    """Return the texts of a list in UTF-8 by their JSON pointers. Raise Problem if one cannot be encoded."""
    found = locate([*map(write_input, texts)], field)
    for pointer, text in found.items():
        check_text(text, resources.settings.max_text_chars, pointer)
    return found


router = APIRouter(tags=["openai"])


@serve(router, EMBED)
async def post_embeddings(request: Request, resources: ResourcesDependency) -> Response:
    """Return the vectors of texts in the format of OpenAI's API; docs/OPENAI.md lists the differences."""
    async with receiving(request, resources, read_request, is_quick=True) as (hold, (wanted, texts)):
        encoding = wanted.encoding()
        answered = await embed(resources, hold, encoding, texts)
        spec = await find_spec(resources.registry, encoding)
        return await write(answered, lambda: write_answer(wanted, answered, spec))


def read_request(body: bytes, resources: Resources) -> tuple[EmbeddingsRequest, dict[str, bytes]]:
    """Return the decoded request and its checked inputs. Raise Problem and InvalidOption."""
    wanted = decode_body(body, EMBEDDINGS_DECODER)
    return wanted, read_checked_inputs(wanted, resources.settings.max_text_chars)


def read_checked_inputs(request: EmbeddingsRequest, max_chars: int) -> dict[str, bytes]:
    """Return the inputs of read_inputs by their JSON pointers, all texts checked. Raise Problem and InvalidOption."""
    found = locate(read_inputs(request), "input", is_list=request.has_list)
    for pointer, text in found.items():
        if not has_token_ids(text):
            check_text(text, max_chars, pointer)
    return found


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
