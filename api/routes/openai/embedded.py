"""Embedding of a request's texts, for all routes that answer vectors: a worker encodes them, and failures are named."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from api.bodies.embeddings import check_text, refuse_failures
from api.dependencies import Resources
from api.door.media_types import require_json
from api.intake.submissions import read_body
from api.limits.gates import Hold
from api.queries.encoding import answer_many
from api.queries.exchange import Answered
from vectormill.batches.endpoints import EncodingRequest, resolve_spec, write_input
from vectormill.domain.encoding import EncodingSpec
from vectormill.models.registry import Registry

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
) -> tuple[Answered, int]:
    """Return the vectors of the texts of a field, and the number of tokens that were read.

    Raises Problem for a text that has no vector, and the errors of find_spec and answer_many.
    """
    spec = await find_spec(resources.registry, encoding)
    num_bytes = measure(spec, texts)
    if num_bytes > SMALL_VECTORS:
        # The vectors and the answer made of them are five times as much; a byte of JSON is held for 16.
        hold.take(num_bytes * 5 // 16)
    answered = await answer_many(resources, spec, texts)
    refuse_failures(field, answered, is_list=is_list)
    return answered, answered.num_tokens


async def find_spec(registry: Registry, encoding: EncodingRequest) -> EncodingSpec:
    """Return the requested spec, read in a thread where that may wait for a hub. Raises as resolve_spec."""
    if registry.is_read(encoding.model):
        return resolve_spec(registry, encoding)
    return await run_in_threadpool(resolve_spec, registry, encoding)


async def write(answered: Answered, work: Callable[[], bytes]) -> bytes:
    """Write the answer, in a thread where it is large enough to hold up other requests."""
    return work() if answered.vectors.nbytes <= SMALL_VECTORS else await run_in_threadpool(work)


def measure(spec: EncodingSpec, texts: Sequence[bytes]) -> int:
    return 4 * spec.dimensions * len(texts)


def read_texts(texts: Sequence[str], field: str, resources: Resources) -> list[bytes]:
    """Return the texts in UTF-8. Raises Problem for the first that can have no vector."""
    max_chars = resources.settings.max_text_chars
    encoded = list(map(write_input, texts))
    for number, text in enumerate(encoded):
        check_text(text, max_chars, f"/{field}/{number}")
    return encoded
