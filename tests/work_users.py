"""The users of the package for leased work, each with one row, as the contract suite drives them.

Carrying out is the product's own code. It calls `during` halfway, which returns True when the process is to
stop.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq
from sqlalchemy import Connection, Engine, text

from indexer.context import RunContext
from indexer.loops import process_batch
from indexer.phases import Tools, carry_out
from scheduler.webhooks import attempt
from tests.api_server import encode_waiting
from tests.database import ask
from tests.indexers import ListedSource, row, start_run
from tests.obedient_engine import ObedientEngine, encoding_chunks, run_to_end
from tests.protocol import SPEC, submit
from tests.request_batches import finish, keep_all, line, write
from tests.webhooks import make_webhook
from vectormill.batches.batches import BATCHES, HeldBatch, cancel_batch, claim_batch, create_batch
from vectormill.batches.files import FileWriter
from vectormill.batches.request_batch import BATCH, EMBEDDINGS, NewRequestBatch
from vectormill.db.session import make_engine
from vectormill.domain.errors import LeaseLost, RunCancelled, WrongBatchState, WrongJobState, WrongRunState
from vectormill.domain.states import States
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.chunk import LEASED, UNCLAIMED_CHUNK_STATES, Claim
from vectormill.jobs.chunks import claim_chunk, release_chunk, renew_leases
from vectormill.jobs.dispatch import list_demands, mark_queued
from vectormill.jobs.item import Item
from vectormill.jobs.job import NewJob
from vectormill.jobs.jobs import cancel_job
from vectormill.jobs.operations import InputBody
from vectormill.jobs.submission import JobWriter
from vectormill.models.registry import Registry
from vectormill.objects.input import INPUT, HeldInput, claim_input
from vectormill.objects.manifest import MANIFEST, read_manifest
from vectormill.objects.output import CLOSING, OUTPUT, HeldOutput, claim_output
from vectormill.objects.parts import STAGED, close_output, sweep
from vectormill.objects.reading import add_objects, read_input
from vectormill.objects.store import list_folder, write_object
from vectormill.runs.differences import drop_left_stages
from vectormill.runs.runs import COUNT_NAMES, RUNS, cancel_run, claim_run, find_run
from vectormill.settings import Settings
from vectormill.webhooks.webhook import MAX_ATTEMPTS, Posting, Reply
from vectormill.webhooks.webhooks import DELIVERIES, claim_deliveries, fail_pending, post_test
from vectormill.work.work import Stopping, Work, handing_back
from worker.engine.request import EncodeRequest, EngineStopped

# A lease, or an object with the same methods, and the rest of the claim.
Claimed = tuple[Any, Any]
During = Callable[[], bool]


def never() -> bool:
    return False


@contextmanager
def apart(engine: Engine) -> Iterator[Engine]:
    """Yield an engine for actors whose statements are not steps of the code under test."""
    others = make_engine(
        engine.url.render_as_string(hide_password=False), application_name="others", pool_size=1
    )
    try:
        yield others
    finally:
        others.dispose()


def finish_all(user: "User", engine: Engine) -> None:
    """Carry out whatever can be claimed."""
    while True:
        claimed = ask(engine, user.claim)
        if claimed is None:
            return
        user.carry_out(engine, claimed)


class User(Protocol):
    """A table that takes part in leased work, with one row."""

    work: Work
    done: str  # the state in which its row ends when nothing fails
    cancelled: frozenset[str]  # the states of its row after a cancellation, the final one among them
    tables: tuple[str, ...]

    @property
    def max_attempts(self) -> int | None:
        """Return the attempts after which the row fails; None if a process's death is no attempt."""

    def make(self, engine: Engine) -> None: ...

    def claim(self, connection: Connection, lease_seconds: float = 30) -> Claimed | None: ...

    def carry_out(self, engine: Engine, claimed: Claimed, during: During = never) -> None: ...

    def finish(self, engine: Engine) -> None:
        """Bring the row to its final state, including the work of other processes."""

    def cancel(self, connection: Connection) -> None:
        """Cancel the row; do nothing if it can no longer be cancelled."""

    def count_effects(self, connection: Connection) -> Any:
        """Return the effects of the work, which must be the same however often it was interrupted."""


class Deliveries:
    """Deliveries with one message, whose receiver accepts it."""

    work = DELIVERIES
    max_attempts = MAX_ATTEMPTS
    done = "delivered"
    cancelled: frozenset[str] = frozenset({"failed"})
    tables: tuple[str, ...] = ("webhook_deliveries", "webhooks")

    def make(self, engine: Engine) -> None:
        webhook, _ = make_webhook(engine)
        ask(engine, post_test, webhook, datetime.now(UTC))

    def claim(self, connection: Connection, lease_seconds: float = 30) -> Claimed | None:
        claimed = claim_deliveries(connection, {}, owner="test", most=4, room=9, lease_seconds=lease_seconds)
        return claimed[0] if claimed else None

    def carry_out(self, engine: Engine, claimed: Claimed, during: During = never) -> None:
        async def post(posting: Posting) -> Reply:
            if during():
                raise asyncio.CancelledError
            return Reply(200)

        asyncio.run(attempt(engine, post, *claimed))

    finish = finish_all

    def cancel(self, connection: Connection) -> None:
        webhook = connection.execute(text("SELECT id FROM vectormill.webhooks")).scalar_one()
        fail_pending(connection, webhook, "It was cancelled.", "It was cancelled.")

    def count_effects(self, connection: Connection) -> Any:
        counts = connection.execute(
            text("SELECT num_delivered, num_refused, num_failed FROM vectormill.webhooks")
        )
        return tuple(counts.one())


class ValidatingBatches:
    """Request batches with one batch whose lines are validated: two are answered and two refused."""

    work = BATCHES
    max_attempts = Settings().max_attempts
    done = "completed"
    cancelled: frozenset[str] = frozenset({"cancelling", "cancelled"})
    tables: tuple[str, ...] = ("request_batches", "request_files", "jobs")

    def make(self, engine: Engine) -> None:
        content = write(line("good", "x"), b"no json", line("empty", " "), line("last", ["y", "z"]))
        with FileWriter(engine) as writer:
            writer.add(content)
            file = writer.finish(BATCH, "lines.jsonl", None)
        ask(engine, create_batch, NewRequestBatch(EMBEDDINGS, file.id, "24h"))

    def claim(self, connection: Connection, lease_seconds: float = 30) -> Claimed | None:
        return claim_batch(connection, "test", lease_seconds)

    def carry_out(self, engine: Engine, claimed: Claimed, during: During = never) -> None:
        lease, batch = claimed
        held = HeldBatch(
            engine=engine,
            lease=lease,
            is_stopping=during,
            batch=batch,
            settings=Settings(),
            registry=Registry({}),
        )
        process_batch(held)

    def finish(self, engine: Engine) -> None:
        finish(engine)

    def cancel(self, connection: Connection) -> None:
        batch_id = connection.execute(text("SELECT id FROM vectormill.request_batches")).scalar_one()
        try:
            cancel_batch(connection, batch_id)
        except WrongBatchState:
            return

    def count_effects(self, connection: Connection) -> Any:
        batch = connection.execute(
            text("SELECT num_lines, num_refused, num_completed, num_failed FROM vectormill.request_batches")
        ).one()
        jobs = connection.execute(
            text("SELECT count(*) FROM vectormill.jobs WHERE state NOT IN ('uploading', 'deleting')")
        ).scalar_one()
        files = connection.execute(
            text("SELECT filename, num_bytes FROM vectormill.request_files WHERE state = 'processed'")
        )
        sizes = sorted((row.filename.rpartition("_")[2], row.num_bytes) for row in files)
        return (*batch, jobs, sizes)


class FinalizingBatches(ValidatingBatches):
    """Request batches with one batch whose job has ended: answers are counted and written."""

    def make(self, engine: Engine) -> None:
        super().make(engine)
        keep_all(engine)
        encode_waiting(engine)


# The rows differ from the changed ones in every way that a run tells apart.
ROWS = [row(f"k{number}", f"text {number}", page=number) for number in range(12)]
CHANGED_ROWS = [
    *ROWS[:8],
    row("k8", "another text", page=8),
    row("k9", "text 9", page=99),
    row("renamed", "text 10", page=10),
    row("new", "a new text"),
    row("broken", " "),
]


class Runs:
    """Runs with one run, whose source differs from its collection in every way."""

    work = RUNS
    max_attempts = Settings().max_attempts
    done = "completed_with_errors"
    cancelled: frozenset[str] = frozenset({"cancelling", "cancelled"})
    tables: tuple[str, ...] = ("runs", "jobs", "collections")
    _names = count()

    def make(self, engine: Engine) -> None:
        self._collection = f"docs_{next(self._names)}"
        submit(engine, ROWS, collection=self._collection)
        encode_waiting(engine)
        start_run(engine, self._collection)

    def claim(self, connection: Connection, lease_seconds: float = 30) -> Claimed | None:
        return claim_run(connection, "test", lease_seconds)

    def carry_out(self, engine: Engine, claimed: Claimed, during: During = never) -> None:
        def check() -> None:
            if ask(engine, find_run, claimed[0].key).state == "cancelling":
                raise RunCancelled

        def open_source(context: RunContext) -> ListedSource:
            if during():
                raise Stopping
            return ListedSource(CHANGED_ROWS, batch=7)

        with apart(engine) as workers:
            tools = Tools(
                engine,
                Settings(chunk_max_items=2),
                Registry({}),
                open_source,
                lambda _: encode_waiting(workers),
            )
            carry_out(*claimed, tools, check)

    def finish(self, engine: Engine) -> None:
        """Carry out whatever can be claimed, and drop what is left of ended runs, as an indexer does every so often."""
        finish_all(self, engine)
        drop_left_stages(engine)

    def cancel(self, connection: Connection) -> None:
        run_id = connection.execute(text("SELECT id FROM vectormill.runs")).scalar_one()
        try:
            cancel_run(connection, run_id)
        except WrongRunState:
            return

    def count_effects(self, connection: Connection) -> Any:
        counts = connection.execute(text("SELECT to_jsonb(one) FROM vectormill.runs AS one")).scalar_one()
        rows = connection.execute(
            text(f"SELECT key, content_hash, metadata FROM public.{self._collection} ORDER BY key")
        )
        encoded = text(
            "SELECT coalesce(sum(num_done + num_failed), 0) FROM vectormill.jobs WHERE metadata ? 'run'"
        )
        stages = text("SELECT count(*) FROM pg_class WHERE relname ~ '^run_[0-9a-f]{32}_' AND relkind = 'r'")
        return (
            {name: counts[name] for name in COUNT_NAMES},
            rows.all(),
            connection.execute(encoded).scalar_one(),
            connection.execute(stages).scalar_one(),
        )


@dataclass(frozen=True, slots=True)
class ChunkLease:
    """The lease of a chunk, by the SQL statements that only chunks use."""

    claim: Claim
    seconds: float
    state = LEASED

    @property
    def key(self) -> int:
        return self.claim.chunk_id

    @property
    def fence(self) -> int:
        return self.claim.fence

    @property
    def attempt(self) -> int:
        return self.claim.attempt

    def keep(self, connection: Connection) -> str:
        if self.key not in renew_leases(connection, [self.claim], self.seconds):
            raise LeaseLost
        return LEASED

    renew = keep

    def hand_back(self, connection: Connection) -> None:
        if not release_chunk(connection, self.claim, "It was handed back.", is_counted=False):
            raise LeaseLost


class Chunks:
    """Chunks with one chunk of one text, whose message is repeated after a dispatch or a lapse."""

    work = Work(
        table="vectormill.chunks",
        row="chunk",
        working=States((LEASED,)),
        begins=dict.fromkeys(UNCLAIMED_CHUNK_STATES, LEASED),
    )
    max_attempts: int | None = None
    done = "done"
    cancelled: frozenset[str] = frozenset({"cancelled"})
    tables: tuple[str, ...] = ("jobs",)

    def make(self, engine: Engine) -> None:
        job = submit(engine, [Item("key", b"text")])
        ask(engine, mark_queued, [(job.id, 0)])  # begins the job and dispatches no chunk

    def claim(self, connection: Connection, lease_seconds: float = 30) -> Claimed | None:
        demands = list_demands(connection, [SPEC.model], 1)
        mark_queued(connection, [(demand.job_id, 1) for demand in demands])
        # A message that was sent is repeated; a pending chunk has none.
        sent = text("SELECT id FROM vectormill.chunks WHERE state <> 'pending'")
        chunk_id = connection.execute(sent).scalar_one_or_none()
        claimed = chunk_id and claim_chunk(connection, chunk_id, "test", SPEC.model, lease_seconds)
        return None if not claimed else (ChunkLease(claimed.claim, lease_seconds), claimed)

    def carry_out(self, engine: Engine, claimed: Claimed, during: During = never) -> None:
        def before(request: EncodeRequest) -> None:
            if during():
                raise EngineStopped

        with (
            apart(engine) as heart,
            encoding_chunks(engine, ObedientEngine(before), heart=heart, heartbeat_seconds=5) as encoder,
            encoder._timesheet.hold(claimed[1].claim.job_id),
        ):
            encoder._encode_claimed(claimed[1], time.monotonic())

    finish = finish_all

    def cancel(self, connection: Connection) -> None:
        job_id = connection.execute(text("SELECT id FROM vectormill.jobs")).scalar_one()
        try:
            cancel_job(connection, job_id)
        except WrongJobState:
            return

    def count_effects(self, connection: Connection) -> Any:
        counts = connection.execute(
            text("""
                SELECT state, num_done, num_failed, num_open_chunks, num_tokens,
                       (SELECT count(*) FROM vectormill.chunk_vectors JOIN vectormill.chunks ON id = chunk_id)
                  FROM vectormill.jobs
            """)
        )
        return tuple(counts.one())


def new_folder() -> str:
    """Return the URL of a new empty folder among the temporary files."""
    return f"file://{tempfile.mkdtemp()}/out"


class ChunksToStorage(Chunks):
    """Chunks with one chunk whose result goes into object storage: only what a commit has recorded counts."""

    tables: tuple[str, ...] = ("jobs", "job_outputs")

    def make(self, engine: Engine) -> None:
        job = submit(engine, [Item("key", b"text")], output_url=new_folder())
        ask(engine, mark_queued, [(job.id, 0)])

    def count_effects(self, connection: Connection) -> Any:
        url = connection.execute(text("SELECT url FROM vectormill.job_outputs")).scalar_one()
        rows = [
            tuple(row.items())
            for part in connection.execute(text("SELECT name FROM vectormill.output_parts")).scalars()
            for row in pq.read_table(f"{url.removeprefix('file://')}/{part}").to_pylist()
        ]
        return (*super().count_effects(connection), str(rows))


class Outputs:
    """Outputs with that of an ended job of three chunks, next to whose results lie some that no commit has recorded."""

    work = OUTPUT
    max_attempts: int | None = None
    done = "swept"
    cancelled: frozenset[str] = frozenset()
    tables: tuple[str, ...] = ("jobs", "job_outputs")

    def make(self, engine: Engine) -> None:
        self._url = new_folder()
        items = [Item(f"key {number}", b"text") for number in range(3)]
        job = submit(engine, items, output_url=self._url, chunk_max_items=1)
        with encoding_chunks(engine) as encoder:
            run_to_end(engine, encoder, job)
        write_object(f"{self._url}/{STAGED}orphan.rows", b"of a worker that lost its lease", ANYWHERE)

    def claim(self, connection: Connection, lease_seconds: float = 30) -> Claimed | None:
        return claim_output(connection, "test", lease_seconds)

    def carry_out(self, engine: Engine, claimed: Claimed, during: During = never) -> None:
        held = HeldOutput(
            engine=engine, lease=claimed[0], is_stopping=during, place=claimed[1], roots=ANYWHERE
        )
        with handing_back(engine, claimed[0]):
            held.keep()
            if claimed[0].state == CLOSING:
                close_output(held, grace_seconds=0)
            else:
                sweep(held, grace_seconds=0)

    finish = finish_all

    def cancel(self, connection: Connection) -> None:
        """Do nothing: the end of a job is not undone."""

    def count_effects(self, connection: Connection) -> Any:
        names = sorted(each.url.rpartition("/")[2] for each in list_folder(self._url, ANYWHERE))
        names = [name if name.startswith("_") else name.partition("-")[0] for name in names]
        manifest = read_manifest(self._url) if MANIFEST in names else None
        rows = None if manifest is None else manifest.num_rows
        parts = connection.execute(text("SELECT count(*), sum(num_rows) FROM vectormill.output_parts")).one()
        return names, rows, tuple(parts)


class Inputs:
    """Inputs with one of three objects, whose keys are compared, next to what an interrupted reading has written."""

    work = INPUT
    max_attempts = Settings().max_attempts
    done = "read"
    cancelled: frozenset[str] = frozenset({"cancelled"})
    tables: tuple[str, ...] = ("jobs",)

    def make(self, engine: Engine) -> None:
        folder = new_folder()
        for number in range(3):
            lines = "".join(f'{{"id": "{number} {row}", "text": "a text"}}\n' for row in range(5))
            write_object(f"{folder}/{number}.jsonl", lines.encode(), ANYWHERE)
        wanted = InputBody([f"{folder}/*.jsonl"], key="id", unique=True)
        new_job = NewJob(SPEC, collection="docs", to=None)
        with JobWriter(engine, new_job, self._settings) as writer:
            add_objects(writer, wanted, SPEC, self._settings)
            ask(engine, writer._upload.write)
            writer.hand_over(wanted, lambda _, job: None)

    _settings = Settings(chunk_max_items=2, source_root=(Path("/"),))

    def claim(self, connection: Connection, lease_seconds: float = 30) -> Claimed | None:
        claimed = claim_input(connection, "test", lease_seconds)
        return None if claimed is None else (claimed[0], claimed[1:])

    def carry_out(self, engine: Engine, claimed: Claimed, during: During = never) -> None:
        lease, (wanted, collection, error) = claimed
        with handing_back(engine, lease):
            read_input(
                HeldInput(
                    engine=engine,
                    lease=lease,
                    is_stopping=during,
                    wanted=wanted,
                    collection=collection,
                    error=error,
                    settings=self._settings,
                )
            )

    finish = finish_all

    def cancel(self, connection: Connection) -> None:
        job_id = connection.execute(
            text("SELECT id FROM vectormill.job_inputs WHERE state <> 'read'")
        ).scalar()
        if job_id is not None:
            cancel_job(connection, job_id)

    def count_effects(self, connection: Connection) -> Any:
        job = text("SELECT state, num_items, num_chunks, num_open_chunks, content_hash FROM vectormill.jobs")
        chunks = text("SELECT seq, first_item, num_items, state FROM vectormill.chunks ORDER BY seq")
        state, *counts, content_hash = connection.execute(job).one()
        assert content_hash is not None
        return state, counts, connection.execute(chunks).all()


USERS: tuple[User, ...] = (
    Deliveries(), ValidatingBatches(), FinalizingBatches(), Runs(), Chunks(), ChunksToStorage(), Outputs(), Inputs(),
)  # fmt: skip
