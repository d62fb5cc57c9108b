"""Readers of `*.parquet` see each row of an output at most once at every moment, and exactly once from `closed` on.

Jobs are encoded, retried, closed and swept by processes that are killed before any statement, and before or after any
operation of the store. There they may also stall beyond their lease, while others do their work, and then go on.
"""

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch
from uuid import uuid4

import numpy as np
import obstore
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event, text

from indexer.loops import OutputLoop
from tests.database import ask, execute, load_payload
from tests.integration.objects.conftest import Place
from tests.integration.work.test_contract import Killed
from tests.protocol import claim, dispatch_all, make_items, results_of, submit
from vectormill.domain.errors import LeaseLost, WrongJobState
from vectormill.files.roots import ANYWHERE, Roots
from vectormill.jobs.chunk import ChunkOutcome
from vectormill.jobs.item import EMPTY_TEXT, ItemFailure, Items
from vectormill.jobs.jobs import retry_job
from vectormill.objects import parts
from vectormill.objects.manifest import read_table
from vectormill.objects.parts import write_staged
from vectormill.settings import Settings
from worker.chunk.commit import PostgresSink

FAILURE: Final = ItemFailure(EMPTY_TEXT, "empty")
NUM_ITEMS: Final = 9
NUM_CHUNKS: Final = 5
# As large as two or three chunks.
PART_BYTES: Final = 7000
# What interrupts a process: the number of acts of others until it goes on, or its end.
KILL: Final = 0
CLOSED: Final = ("closed", "sweeping", "swept")

FIND_OUTPUT = text("""
    SELECT output.state, num_done FROM vectormill.jobs JOIN vectormill.job_outputs AS output USING (id)
""")
LAPSE = text(
    "UPDATE vectormill.job_outputs SET available_at = now(), lease_until = least(lease_until, now())"
)
GIVE_UP = text("""
    UPDATE vectormill.chunks SET state = 'pending', lease_owner = NULL, lease_until = NULL, available_at = now()
     WHERE state IN ('queued', 'leased')
""")

# The operations that write an object to a store, and a file to a folder.
WRITING = ((obstore, "put"), (obstore, "delete"), (Roots, "write"), (Roots, "delete"))


class World:
    """A job with an output, and the processes that work on it; `look` is called after every change of the store."""

    def __init__(self, engine: Engine, url: str, place: Place) -> None:
        execute(engine, "TRUNCATE vectormill.jobs CASCADE")
        self.engine, self.place = engine, place
        self.folder = f"out{uuid4()}/"
        self.messages: list[int] = []
        self.meanwhile: list[Callable[[], None]] = []
        self.interruptions: dict[int, int] = {}
        self.num_moments = self.depth = 0
        self.faults: list[AssertionError] = []
        self.job = submit(engine, make_items(NUM_ITEMS), output_url=self.url, chunk_max_items=2)
        self.keeper = OutputLoop(url, Settings(output_grace_seconds=1e-6), "test")

    @property
    def url(self) -> str:
        return f"{self.place.url}/{self.folder}".rstrip("/")

    # -- what readers see ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        # `**/*.parquet` matches what `*.parquet` does, and more.
        names = [name for name in self.place.names() if name.startswith(self.folder)]
        rows = [name for name in names if name.endswith(".parquet")]
        assert {name.rpartition("/")[0] for name in rows} <= {self.folder.rstrip("/")}
        # Programs that read a folder leave out what begins with `_`, and would read all else.
        assert rows == [name for name in names if not name.removeprefix(self.folder).startswith("_")]
        keys = [key for name in rows for key in self._read_keys(name)]
        assert len(keys) == len(set(keys)), f"a row is there twice in {rows}"
        state, num_done = self.find_output()
        assert state not in CLOSED or len(keys) == num_done, f"{len(keys)} rows of {num_done} in {rows}"

    def _read_keys(self, name: str) -> list[str]:
        table = pq.read_table(io.BytesIO(self.place.read(name)), columns=["key"])
        return table.column("key").to_pylist()  # type: ignore[no-any-return]

    def find_output(self) -> tuple[str, int]:
        state, num_done = execute(self.engine, FIND_OUTPUT).one()
        return state, num_done

    # -- what interrupts a process ------------------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        def statement(*arguments: Any) -> None:
            self._pass(is_idle=False)

        def watch(place: Any, name: str) -> Any:
            operation = getattr(place, name)

            def run(*arguments: Any, **options: Any) -> Any:
                self._pass(is_idle=True)
                result = operation(*arguments, **options)
                try:
                    self.look()
                except AssertionError as fault:  # which a process would take for one of the store
                    self.faults.append(fault)
                self._pass(is_idle=True)
                return result

            return patch.object(place, name, run)

        engine = self.keeper._engine
        event.listen(engine, "before_cursor_execute", statement)
        event.listen(engine, "commit", statement)
        with ExitStack() as watches:
            for place, name in WRITING:
                watches.enter_context(watch(place, name))
            try:
                yield
            finally:
                event.remove(engine, "before_cursor_execute", statement)
                event.remove(engine, "commit", statement)
                self.keeper.close()

    def _pass(self, *, is_idle: bool) -> None:
        """Be killed here, or stall while another process acts; in a transaction, others would wait for its locks."""
        num_acts = self.interruptions.get(self.num_moments)
        self.num_moments += 1
        if num_acts == KILL:
            raise Killed
        if num_acts is not None and is_idle and self.depth < 2:
            acts, self.meanwhile = self.meanwhile[:num_acts], self.meanwhile[num_acts:]
            for act in acts:
                self.act(act)

    def act(self, process: Callable[[], None]) -> None:
        self.depth += 1
        try:
            process()
        except Killed:
            pass
        finally:
            self.depth -= 1
        self.look()
        for fault in self.faults:
            raise fault

    # -- processes ----------------------------------------------------------------------------------------------------

    def encode(self, *, is_whole: bool = True) -> None:
        """Encode a chunk as a worker does; if not `is_whole`, an item of it fails."""
        self.messages += [dispatch.chunk_id for dispatch in dispatch_all(self.engine)]
        claimed = claim(self.engine, self.messages.pop(0)) if self.messages else None
        if claimed is None:
            return
        items = ask(self.engine, load_payload, claimed.chunk_id)
        wanted = claimed.wanted_items(0, claimed.num_items)
        encoded = np.array(range(claimed.num_items) if wanted is None else wanted)
        results = results_of(claimed.spec, [items[position] for position in encoded.tolist()])
        outcome = ChunkOutcome({} if is_whole else {int(encoded[0]): FAILURE}, 1, 1)
        try:
            PostgresSink(self.engine, threading.Event(), output_roots=ANYWHERE).commit(
                claimed, items, encoded, results, outcome
            )
        except LeaseLost:
            return

    def encode_badly(self) -> None:
        self.encode(is_whole=False)

    def stall(self) -> None:
        """Write the results of a chunk and never commit them; somebody else gets the chunk."""
        self.messages += [dispatch.chunk_id for dispatch in dispatch_all(self.engine)]
        claimed = claim(self.engine, self.messages[0], lease_seconds=-1) if self.messages else None
        if claimed is None:
            return
        items = ask(self.engine, load_payload, claimed.chunk_id)
        results = results_of(claimed.spec, list(items))
        positions = np.arange(len(items))
        write_staged(
            self.engine, claimed, Items.of(list(items)), positions, results, ChunkOutcome({}, 1, 1), ANYWHERE
        )

    def encode_all(self) -> None:
        for _ in range(NUM_CHUNKS):
            self.encode()

    def retry(self) -> None:
        with self.engine.begin() as connection:
            try:
                retry_job(connection, self.job.id)
            except WrongJobState:
                return

    def keep(self) -> None:
        """Claim the output, whoever has held it, and take a step with it."""
        execute(self.engine, LAPSE)
        self.keeper.step()

    def finish(self) -> None:
        """Bring everything to its end, without failures."""
        self.interruptions = {}
        for _ in range(3):
            execute(self.engine, GIVE_UP)
            self.encode_all()
            self.retry()
        for _ in range(3):
            self.act(self.keep)
        assert self.find_output() == ("swept", NUM_ITEMS)
        names = [
            name.removeprefix(self.folder) for name in self.place.names() if name.startswith(self.folder)
        ]
        parts = [name for name in names if not name.startswith("_")]
        assert names == ["_job.json", "_manifest.json", *parts]
        keys = sorted(key for part in parts for key in self._read_keys(f"{self.folder}{part}"))
        assert keys == sorted(read_table(self.url).column("key").to_pylist())
        assert keys == sorted(item.key for item in make_items(NUM_ITEMS))


ACTS: Final[Sequence[Callable[[World], None]]] = (
    World.encode, World.encode_badly, World.stall, World.encode_all, World.retry, World.keep, World.keep, World.keep,
)  # fmt: skip
HISTORIES: Final = {
    "acts": st.lists(st.sampled_from(ACTS), min_size=4, max_size=14),
    "meanwhile": st.lists(st.sampled_from(ACTS), max_size=12),
    "interruptions": st.dictionaries(st.integers(0, 150), st.sampled_from([KILL, 1, 3, 4]), max_size=6),
}


def run_history(
    engine: Engine,
    url: str,
    place: Place,
    acts: Sequence[Callable[[World], None]],
    meanwhile: Sequence[Callable[[World], None]],
    interruptions: dict[int, int],
) -> None:
    world = World(engine, url, place)
    world.meanwhile = [act.__get__(world) for act in meanwhile]
    world.interruptions = dict(interruptions)
    with patch.object(parts, "PART_BYTES", PART_BYTES), world.watched():
        for act in acts:
            world.act(act.__get__(world))
        world.finish()


def check(engine: Engine, url: str, place: Place, max_examples: int) -> None:
    @settings(
        max_examples=max_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(**HISTORIES)
    def play(**history: Any) -> None:
        run_history(engine, url, place, **history)

    play()


def test_readers_see_no_row_twice_at_any_moment_and_each_one_once_it_is_closed(
    engine: Engine, database_url: str, place: Place
) -> None:
    check(engine, database_url, place, 15)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_readers_see_no_row_twice_in_many_more_histories(
    engine: Engine, database_url: str, place: Place
) -> None:
    check(engine, database_url, place, 500)


@pytest.mark.parametrize("num_acts", [KILL, 3])
def test_a_closing_that_is_interrupted_at_any_moment_shows_no_row_twice(
    engine: Engine, database_url: str, place: Place, num_acts: int
) -> None:
    moment, was_reached = 0, True
    while was_reached:
        world = World(engine, database_url, place)
        world.encode_badly()
        world.encode_all()
        with patch.object(parts, "PART_BYTES", PART_BYTES), world.watched():
            # The job is tried again while its output is being closed, and another process closes it.
            world.interruptions = {moment: num_acts}
            world.meanwhile = [world.retry, world.encode, world.keep]
            world.act(world.keep)
            world.act(world.keep)
            was_reached = world.num_moments > moment
            world.finish()
        moment += 1 if place.url.startswith("file:") else 5  # closing takes the same steps in every store
    assert moment > 30
