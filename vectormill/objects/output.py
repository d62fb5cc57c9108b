"""Output: the folder of an object store that a job writes its results into, its manifest and its sweep.

States: `open` while the job is going on, `ended` from its end on, `closing` while its parts and its manifest are being
written (parts.py), `closed` when they are there, `sweeping` while staged parts are being removed, and `swept` at the
end. A retry of the job opens its output again: it then gets more parts, and the others stay as they are.
"""

from dataclasses import asdict, dataclass
from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy import Connection, text

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import OutputTaken
from vectormill.domain.states import States
from vectormill.files.roots import NOWHERE, Roots
from vectormill.objects.iceberg import SCHEME, prepare_table
from vectormill.objects.store import delete_object, list_folder, write_object
from vectormill.settings import Settings
from vectormill.work.work import Held, Lease, Work, claim

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
REOPEN: Final = OUTPUT.compose_revocation(
    f"state = '{OPEN}', closed_at = NULL, attempt = 0, last_error = NULL, available_at = now()",
    f"id = :job_id AND state <> '{OPEN}'",
)

ADD_OUTPUT: Final = text("""
    INSERT INTO vectormill.job_outputs (id, url, table_url, table_schema, state)
    VALUES (:job_id, :url, :table_url, :table_schema, 'open')
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
    """An output that this process has claimed. Local ones lie beneath `roots`."""

    place: OutputPlace
    roots: Roots = NOWHERE

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
    roots, content = Roots.of(settings, "output_root"), msgspec.json.encode({"job_id": str(job_id)})
    is_taken = any(True for _ in list_folder(place.url, roots))
    is_taken = is_taken or not write_object(f"{place.url}/{OWNER}", content, roots, only_new=True)
    if is_taken:
        raise OutputTaken(
            f"{place.url} is not empty. Give a folder that has no objects yet: each job needs one of its own."
        )
    return place


def leave_folder(url: str, settings: Settings) -> None:
    """Give a folder back that `take_place` has taken for a job which was not submitted after all."""
    delete_object(f"{url}/{OWNER}", Roots.of(settings, "output_root"))


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
    for lease, row in claim(connection, OUTPUT, CLAIM_OUTPUT, owner=owner, lease_seconds=lease_seconds):
        return lease, OutputPlace(row.url, row.table_url)
    return None
