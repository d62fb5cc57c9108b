"""Output: the folder of an object store that a job writes its results into, its manifest and its sweep.

States: `open` while the job is going on, `ended` from its end on, `closing` while the manifest is being written,
`closed` when it is there, `sweeping` while parts that do not count are being removed, and `swept` at the end. A
retry of the job opens its output again.

The parts of an output may also be added to a table of Iceberg (iceberg.py) when it is closed. From the first commit
on the table names them, so only the first claim of such an output may merge parts: afterwards there are only more of
them.
"""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy import Connection, text

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import NotFound, OutputTaken
from vectormill.domain.states import States
from vectormill.objects.iceberg import SCHEME, add_parts, prepare_table
from vectormill.objects.manifest import MANIFEST, Manifest, OutputPart, read_manifest
from vectormill.objects.parts import PREFIX
from vectormill.objects.store import (
    delete_object,
    list_folder,
    refuse_outside,
    write_object,
)
from vectormill.settings import Settings
from vectormill.work.loop import Held
from vectormill.work.work import Lease, Work, claim

OPEN: Final = "open"
ENDED: Final = "ended"
CLOSING: Final = "closing"
CLOSED: Final = "closed"
SWEEPING: Final = "sweeping"
SWEPT: Final = "swept"
# The states in which an indexer has something to do, now or later.
DUE_OUTPUT_STATES: Final = States((ENDED, CLOSING, CLOSED, SWEEPING))
OUTPUT_STATES: Final = States((OPEN, *DUE_OUTPUT_STATES, SWEPT))

# Says whose folder it is, from the submission on, so that no second job writes into it.
OWNER: Final = "_job.json"
# A worker that lost its lease may still be writing its part; after this time it has given up.
GRACE_SECONDS: Final = 900.0
PARTS_AT_ONCE: Final = 10_000

OUTPUT: Final = Work(
    table="vectormill.job_outputs",
    row="output",
    working=States((CLOSING, SWEEPING)),
    begins={ENDED: CLOSING, CLOSED: SWEEPING},
    last_error="last_error",
)

# A trigger on jobs makes an output `ended`, so that this reads a short index however many jobs are open.
CLAIM_OUTPUT: Final = OUTPUT.compose_claim(
    """
    SELECT output.id FROM vectormill.job_outputs AS output
     WHERE {claimable}
     ORDER BY output.available_at LIMIT 1
    {lock}
    """,
    returning="output.url, output.table_url",
)
CLOSE: Final = OUTPUT.compose_release(
    f"state = '{CLOSED}', closed_at = now(), attempt = 0, last_error = NULL, "
    "available_at = now() + make_interval(secs => CAST(:grace_seconds AS double precision))"
)
FINISH: Final = OUTPUT.compose_release(
    f"state = '{SWEPT}', attempt = 0, last_error = NULL, num_swept = num_swept + CAST(:num_swept AS bigint)"
)
REOPEN: Final = OUTPUT.compose_revocation(
    f"state = '{OPEN}', closed_at = NULL, attempt = 0, last_error = NULL, available_at = now()",
    f"id = :job_id AND state <> '{OPEN}'",
)

ADD_OUTPUT: Final = text("""
    INSERT INTO vectormill.job_outputs (id, url, table_url, table_schema, state)
    VALUES (:job_id, :url, :table_url, :table_schema, 'open')
""")

LIST_PARTS: Final = text("""
    SELECT name, first_item, num_rows, num_bytes FROM vectormill.output_parts
     WHERE job_id = :job_id AND name > :after ORDER BY name LIMIT :limit
""")

FIND_KNOWN: Final = text("""
    SELECT name FROM vectormill.output_parts WHERE job_id = :job_id AND name = ANY(CAST(:names AS text[]))
""")

DESCRIBE_JOB: Final = text("""
    SELECT id::text AS job_id, state, spec, num_items, num_done, num_failed, metadata, finished_at
      FROM vectormill.jobs WHERE id = :job_id
""")


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """The folder with the parts of an output, and the table to which they are added at the end, if there is one.

    `table_schema` is the Arrow schema of parts that fit the table, serialized; it is not read again when the output
    is claimed.
    """

    url: str
    table_url: str | None = None
    table_schema: bytes | None = None


@dataclass(slots=True, kw_only=True)
class HeldOutput(Held):
    """An output that this process has claimed."""

    place: OutputPlace

    @property
    def url(self) -> str:
        return self.place.url


def take_place(url: str, job_id: UUID, spec: EncodingSpec, settings: Settings) -> OutputPlace:
    """Make an empty folder, or one of its own below a table of Iceberg, the output of a job.

    Raise OutputTaken if the folder has objects already, StorageUnavailable, and the errors of `prepare_table`.
    """
    place = OutputPlace(url)
    if url.startswith(SCHEME):
        folder, schema = prepare_table(url, job_id, spec)
        place = OutputPlace(folder, url, schema)
        refuse_outside(place.url, settings.output_root, "VECTORMILL_OUTPUT_ROOT", must_be_set=True)
    _take_folder(place.url, job_id)
    return place


def _take_folder(url: str, job_id: UUID) -> None:
    content = msgspec.json.encode({"job_id": str(job_id)})
    is_taken = any(True for _ in list_folder(url)) or not write_object(
        f"{url}/{OWNER}", content, only_new=True
    )
    if is_taken:
        raise OutputTaken(
            f"{url} is not empty. Give a folder that has no objects yet: each job needs one of its own."
        )


def leave_folder(url: str) -> None:
    """Give a folder back that `take_place` has taken for a job which was not submitted after all."""
    delete_object(f"{url}/{OWNER}")


def add_output(connection: Connection, job_id: UUID, place: OutputPlace) -> None:
    """Record the output of a job, in the transaction that makes the job visible."""
    connection.execute(ADD_OUTPUT, {"job_id": job_id, **asdict(place)})


def reopen_output(connection: Connection, job_id: UUID) -> None:
    """Open the output of a job that goes on, if it has one: its manifest is written again at the end."""
    connection.execute(REOPEN, {"job_id": job_id})


def claim_output(
    connection: Connection, owner: str, lease_seconds: float
) -> tuple[Lease, OutputPlace] | None:
    """Claim an output whose manifest is due, or whose sweep is, and return its place; None if there is none."""
    claimed = claim(connection, OUTPUT, CLAIM_OUTPUT, owner=owner, lease_seconds=lease_seconds)
    if not claimed:
        return None
    ((lease, row),) = claimed
    return lease, OutputPlace(row.url, row.table_url)


def list_parts(connection: Connection, job_id: UUID, after: str, limit: int) -> list[OutputPart]:
    """Return the parts of a job that count, in the order of items, after the name `after`."""
    values = {"job_id": job_id, "after": after, "limit": limit}
    return [OutputPart(*row) for row in connection.execute(LIST_PARTS, values)]


def write_manifest(held: HeldOutput, grace_seconds: float = GRACE_SECONDS) -> None:
    """Write the manifest of an ended job and close its output, to be swept after `grace_seconds`.

    If the output has a table, its parts are added to that before. A job that is tried again ends once more, and its
    manifest is then replaced. Raise LeaseLost, Stopping, SpecMismatch and StorageUnavailable.
    """
    job_id, after = held.lease.key, ""
    parts: list[OutputPart] = []
    while True:
        held.keep()
        with held.engine.connect() as connection:
            page = list_parts(connection, job_id, after, PARTS_AT_ONCE)
        if not page:
            break
        parts += page
        after = page[-1].name
    if held.place.table_url is not None:
        # The parts of a former manifest have been added, even if the snapshot that did it is forgotten.
        former: set[str] = set()
        with suppress(NotFound):
            former = {part.name for part in read_manifest(held.url).parts}
        paths = [f"{held.url}/{part.name}" for part in parts if part.name not in former]
        add_parts(held.place.table_url, job_id, paths, held.keep)
    with held.engine.connect() as connection:
        row = connection.execute(DESCRIBE_JOB, {"job_id": job_id}).one()
    manifest = Manifest(
        job_id=row.job_id,
        state=row.state,
        spec=row.spec,
        num_items=row.num_items,
        num_rows=sum(part.num_rows for part in parts),
        num_failed=row.num_failed,
        metadata=row.metadata,
        finished_at=row.finished_at.isoformat(),
        parts=parts,
    )
    write_object(f"{held.url}/{MANIFEST}", msgspec.json.encode(manifest))
    with held.engine.begin() as connection:
        held.lease.release(connection, CLOSE, grace_seconds=grace_seconds)


def sweep(held: HeldOutput, grace_seconds: float = GRACE_SECONDS) -> int:
    """Remove the parts that no commit has recorded, and return their number.

    A young part is left alone, because its writer may be about to commit: then the sweep is repeated. Raise
    LeaseLost, Stopping and StorageUnavailable.
    """
    num_swept, has_young = 0, False
    names: list[str] = []
    for each in list_folder(held.url):
        name = each.url.removeprefix(f"{held.url}/")
        if not name.startswith(PREFIX):
            continue
        if each.modified_at > time.time() - grace_seconds:
            has_young = True
            continue
        names.append(name)
        if len(names) == PARTS_AT_ONCE:
            num_swept += _remove_unknown(held, names)
            names.clear()
    num_swept += _remove_unknown(held, names)
    with held.engine.begin() as connection:
        if has_young:
            held.lease.hand_back(connection, pause_seconds=grace_seconds)
        else:
            held.lease.release(connection, FINISH, num_swept=num_swept)
    return num_swept


def _remove_unknown(held: HeldOutput, names: list[str]) -> int:
    with held.engine.connect() as connection:
        values = {"job_id": held.lease.key, "names": names}
        unknown = sorted(set(names) - set(connection.execute(FIND_KNOWN, values).scalars()))
    for name in unknown:
        held.keep()
        delete_object(f"{held.url}/{name}")
    return len(unknown)
