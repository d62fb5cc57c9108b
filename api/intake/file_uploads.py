"""File uploads: a multipart form becomes a file of requests, block by block, never whole in memory.

Leaving early, for an error or because the client left, removes what was written.
"""

import hashlib
from typing import Final

from fastapi import Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool

from api.dependencies import Resources
from api.intake.multipart import MultipartReader, read_boundary
from api.intake.submissions import make_inflater, read_blocks
from api.problems import Limit, Place, Problem
from vectormill.batches.files import FileWriter
from vectormill.batches.request_batch import BATCH, RequestFile
from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import SubmissionTooLarge

# Around a file lie boundaries and fields.
FORM_BYTES: Final = 64 << 10
ANCHOR: Final = "created_at"
# As in the fields of the form, so in the JSON of a batch.
LEAST_LIFETIME_SECONDS: Final = 1
MOST_LIFETIME_SECONDS: Final = 10 * 365 * 86400


async def receive_file(request: Request, resources: Resources, idempotency_key: str | None) -> RequestFile:
    """Return the file that the form brings, or that an earlier form with the same Idempotency-Key brought, committed.

    Raise Problem, UploadRemoved and IdempotencyMismatch.
    """
    limit = Limit.of(resources.settings, "max_file_bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit.value + FORM_BYTES:
        raise file_too_large(limit)
    boundary = read_boundary(request)
    inflater = make_inflater(request, resources.settings)
    content = hashlib.blake2b()
    with resources.gates.uploads.enter():
        async with contextmanager_in_threadpool(FileWriter(resources.engine)) as writer:

            def take(piece: bytes) -> None:
                if writer.num_bytes + len(piece) > limit.value:
                    raise file_too_large(limit)
                writer.add(piece)
                content.update(piece)

            reader = MultipartReader(boundary, take)

            def store(block: bytes) -> None:
                for piece in inflater.feed(block) if inflater else (block,):
                    reader.feed(piece)

            def finish() -> RequestFile:
                if inflater:
                    inflater.finish()
                reader.finish()
                assert reader.filename is not None
                lifetime = read_lifetime(reader.fields, resources.settings.file_retention_days * 86400)
                purpose = read_purpose(reader.fields)
                named = [writer.num_bytes, reader.filename, sorted(reader.fields.items())]
                content.update(to_jsonb(named).encode())
                return writer.finish(purpose, reader.filename, lifetime, idempotency_key, content.digest())

            async for block in read_blocks(request):
                await run_in_threadpool(store, block)
            return await run_in_threadpool(finish)


def file_too_large(limit: Limit) -> Problem:
    return Problem(
        413,
        SubmissionTooLarge.code,
        f"The file has more than {limit.value:,} bytes ({limit.setting}); divide it into several.",
        limit=limit,
    )


def read_purpose(fields: dict[str, str]) -> str:
    """Raise Problem for any but the one that something is done with here."""
    purpose = fields.get("purpose")
    if purpose == BATCH:
        return BATCH
    said = "is missing" if purpose is None else f"is {purpose[:50]!r}"
    raise refuse_field("purpose", f"purpose {said}; files are taken with the purpose {BATCH!r}")


def read_lifetime(fields: dict[str, str], default_seconds: float) -> float:
    """Read `expires_after[anchor]` and `expires_after[seconds]` of a form. Raise Problem."""
    seconds, anchor = fields.get("expires_after[seconds]"), fields.get("expires_after[anchor]", ANCHOR)
    if anchor != ANCHOR:
        raise refuse_field("expires_after", f"expires_after[anchor] must be {ANCHOR!r}")
    if seconds is None:
        return default_seconds
    is_number = seconds.isascii() and seconds.isdecimal() and len(seconds) < 12
    if not is_number or not LEAST_LIFETIME_SECONDS <= int(seconds) <= MOST_LIFETIME_SECONDS:
        raise refuse_field(
            "expires_after",
            f"expires_after[seconds] must be a whole number from {LEAST_LIFETIME_SECONDS} to {MOST_LIFETIME_SECONDS}",
        )
    return float(seconds)


def refuse_field(name: str, reason: str) -> Problem:
    return Problem(422, "invalid-request", f"{reason}.", errors=[Place(reason, pointer=f"/{name}")])
