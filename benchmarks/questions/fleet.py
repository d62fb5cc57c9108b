"""fleet: how far one Postgres carries chunks of many workers, which are simulated but use the real statements.

A real scheduler, a real indexer, Postgres and Valkey serve one job by reference beside many other open jobs.
Processes are killed at random. At the end every part is compared with the items, and the sample with its objects.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Engine, text

import vectormill
from benchmarks.children.fleet import FleetOrder
from benchmarks.harness import ROOT, BenchmarkFailed, Harness
from benchmarks.processes import count_cpu_seconds
from benchmarks.tables import (
    MEBIBYTES,
    NUMBER,
    Report,
    Table,
    at_least,
    at_most,
    find_percentile,
    tabulate,
    told,
)
from vectormill.cli.stack import END, workplace
from vectormill.db.migrations import upgrade
from vectormill.db.session import make_engine
from vectormill.domain.encoding import EncodingSpec
from vectormill.embedded.postgres import EmbeddedPostgres
from vectormill.embedded.valkey import EmbeddedValkey
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.chunk import TokenEstimate
from vectormill.jobs.dispatch import list_demands, list_rooms
from vectormill.jobs.job import COMPLETED, NewJob
from vectormill.jobs.submission import JobWriter
from vectormill.objects.output import SWEPT
from vectormill.objects.reading import ChunkLimits, cut_object
from vectormill.objects.reference import ItemReference
from vectormill.objects.store import describe_object
from vectormill.processes.lifetimes import end_child, spawn
from vectormill.processes.logs import open_log
from vectormill.rows.columns import Columns
from vectormill.rows.decoding import PARQUET
from vectormill.settings import Settings, process_environment

NUM_ITEMS: Final = 1_000_000_000
ITEMS_PER_CHUNK: Final = 1_316
NUM_SAMPLE: Final = 1_000_000
NUM_OTHER_JOBS: Final = 100_000
NUM_WORKERS: Final = 1_000
SLOTS: Final = 2
NUM_PROCESSES: Final = 4
CONNECTIONS: Final = 15  # of each process of workers, with that of its heartbeats: 64 in all
DEVICE_SECONDS: Final = 0.25
KILL_SECONDS: Final = 20.0
POLL_SECONDS: Final = 2.0
GRACE_SECONDS: Final = 10.0
END_SECONDS: Final = 600.0
# The first window over which the cost of a chunk is measured, and the last.
WINDOW_CHUNKS: Final = 10_000
STEADY_SHARE: Final = 0.95
TABLES: Final = ("jobs", "chunks", "chunk_payloads", "output_parts", "workers")
SPEC: Final = EncodingSpec(
    model="null", revision="1", pooling="mean", normalize=True, dimensions=8, prompt="", max_tokens=64
)

ADD_OTHER_JOBS: Final = text("""
    WITH added AS (
        INSERT INTO vectormill.jobs (id, state, model, spec, priority, num_items, num_chunks, num_open_chunks)
        SELECT gen_random_uuid(), 'queued', CASE WHEN number % 2 = 0 THEN :model ELSE 'unserved' END,
               CAST(:spec AS jsonb), 9, 1, 1, 1
          FROM generate_series(1, :count) AS number
        RETURNING id
    )
    INSERT INTO vectormill.chunks (job_id, seq, state, first_item, num_items, estimated_tokens)
    SELECT id, 0, 'pending', 0, 1, 8 FROM added
""")
COUNT_OPEN: Final = text("SELECT state, num_open_chunks FROM vectormill.jobs WHERE id = :job_id")
COUNT_PARTS: Final = text("""
    SELECT count(*) AS num_parts, sum(num_rows)::bigint AS num_rows, count(DISTINCT first_item) AS num_first
      FROM vectormill.output_parts WHERE job_id = :job_id
""")
FIND_OUTPUT: Final = text("SELECT state, num_swept FROM vectormill.job_outputs WHERE id = :job_id")
MEASURE: Final = text("""
    SELECT coalesce((SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree(named)),
                    pg_total_relation_size(named))::bigint
      FROM CAST('vectormill.' || :name AS regclass) AS named
""")


@dataclass(slots=True)
class Moment:
    """A reading during the job: the number of finished chunks, and each process's processor seconds and memory."""

    seconds: float
    num_done: int
    cpu: dict[str, float]
    memory: dict[str, int]


@dataclass(slots=True)
class Course:
    """The course of the job: moments, the milliseconds of the dispatcher's two queries, and the kills."""

    moments: list[Moment] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)


def run(harness: Harness) -> Report:
    num_items = harness.items or NUM_ITEMS
    with workplace(None) as directory, ExitStack() as exits:
        site = Site(directory, exits)
        harness.say(f"submitting {num_items:,} items by reference and {NUM_OTHER_JOBS:,} other jobs")
        began = time.monotonic()
        job_id, num_chunks = site.submit(num_items)
        submission_seconds = time.monotonic() - began
        before = site.measure_tables()
        site.start()
        course = watch(harness, site, job_id, num_chunks)
        after = site.measure_tables()
        harness.say("waiting for the manifest and the sweep")
        end_seconds, faults = site.finish(job_id, num_items, num_chunks)
        claims, commits, num_lost = site.read_logs()
    # At the end workers wait for the leases of those that were killed, so the last window ends before.
    windows = (find_window(course, 0), find_window(course, round(STEADY_SHARE * num_chunks) - WINDOW_CHUNKS))
    return report(
        num_items, num_chunks, submission_seconds, end_seconds, course, windows, (before, after), (claims, commits),
        num_lost, faults,
    )  # fmt: skip


class Site:
    """Servers, scheduler, indexer and the processes of workers, each of which can be killed and started again."""

    def __init__(self, directory: Path, exits: ExitStack) -> None:
        self._directory, self._exits = directory, exits
        self._folder = directory / "objects"
        self._folder.mkdir()
        self._postgres, valkey = EmbeddedPostgres(directory), EmbeddedValkey(directory)
        exits.callback(self._postgres.stop)
        self._database_url = self._postgres.start()
        exits.callback(valkey.stop)
        self._redis_url = valkey.start()
        upgrade(self._database_url)
        self._environment = process_environment() | {
            "VECTORMILL_DATABASE_URL": self._database_url,
            "VECTORMILL_REDIS_URL": self._redis_url,
            "VECTORMILL_OUTPUT_ROOT": str(self._folder),
            "VECTORMILL_SOURCE_ROOT": str(self._folder),
            "VECTORMILL_OUTPUT_GRACE_SECONDS": str(GRACE_SECONDS),
        }
        self.engine: Engine = make_engine(self._database_url, application_name="bench", pool_size=2)
        exits.callback(self.engine.dispose)
        self._settings = Settings()
        self._sample_end = 0
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._num_starts = 0

    def submit(self, num_items: int) -> tuple[Any, int]:
        """Submit the job and the others; return the job's id and the number of its chunks."""
        num_sample = min(NUM_SAMPLE, num_items)
        table = pa.table(
            {"id": [f"text-{row}" for row in range(num_sample)], "text": ["some text"] * num_sample}
        )
        pq.write_table(table, self._folder / "sample.parquet", row_group_size=20 * ITEMS_PER_CHUNK)
        found = describe_object(f"file://{self._folder}/sample.parquet", ANYWHERE)
        columns = Columns(key="id")
        limits = ChunkLimits(10_000, 1 << 30, 1 << 20)
        new_job = NewJob(SPEC, to=f"file://{self._folder}/vectors")
        num_chunks = 0
        with JobWriter(self.engine, new_job, self._settings) as writer:

            def add(reference: ItemReference) -> None:
                nonlocal num_chunks
                for start in range(0, reference.num_rows, ITEMS_PER_CHUNK):
                    stop = min(start + ITEMS_PER_CHUNK, reference.num_rows)
                    writer.add_reference(reference.take(start, stop), 8 * (stop - start))
                    num_chunks += 1

            for cut in cut_object(found, PARQUET, columns, TokenEstimate(SPEC), limits):
                add(cut.reference)
            left, place = num_items - num_sample, 0
            while left:
                rows = min(left, 20 * ITEMS_PER_CHUNK)
                url = f"file://{self._folder}/absent-{place // 100:05d}.parquet"
                add(ItemReference(url, "tag", 1 << 30, PARQUET, columns, rows, row_group=place % 100))
                left, place = left - rows, place + 1
            job = writer.finish()
        self._sample_end = num_sample
        with self.engine.begin() as connection:
            spec = msgspec.json.encode(SPEC.to_json()).decode()
            connection.execute(ADD_OTHER_JOBS, {"model": SPEC.model, "spec": spec, "count": NUM_OTHER_JOBS})
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE vectormill.jobs, vectormill.chunks"))
        return job.id, num_chunks

    def start(self) -> None:
        for name in self.names:
            self._start(name)
        self._exits.callback(self._stop)

    @property
    def names(self) -> list[str]:
        return ["scheduler", "indexer", *(f"fleet {number}" for number in range(NUM_PROCESSES))]

    def _start(self, name: str) -> None:
        self._num_starts += 1
        command = [sys.executable, "-m", "vectormill.cli", name]
        if name.startswith("fleet"):
            order = FleetOrder(
                database_url=self._database_url, redis_url=self._redis_url, model=SPEC.model,
                name=f"host-{self._num_starts}", num_workers=NUM_WORKERS // NUM_PROCESSES, slots=SLOTS,
                num_connections=CONNECTIONS, device_seconds=DEVICE_SECONDS,
                lease_seconds=self._settings.lease_seconds, heartbeat_seconds=self._settings.heartbeat_seconds,
                sample_end=self._sample_end, log=str(self._directory / f"{name}.jsonl"),
            )  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.children.fleet", msgspec.json.encode(order).decode()]
        with open_log(self._directory / "logs" / f"{name}.log") as log:
            environment = self._environment | {"PYTHONPATH": str(ROOT)}
            self._children[name] = spawn(command, env=environment, output=log)

    def kill(self, name: str) -> None:
        """Kill a process as a crash of its host would, and start it again, with workers of other names."""
        self._children[name].kill()
        self._children[name].wait()
        self._start(name)

    def _stop(self) -> None:
        for child in self._children.values():
            end_child(child, END)

    def look(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return the processor seconds by process, and the resident bytes of each process of ours."""
        assert self._postgres.pid is not None
        cpu = {"postgres": sum(count_cpu_seconds(self._postgres.pid).values())}
        memory = {}
        for name, child in self._children.items():
            process = psutil.Process(child.pid)
            cpu[name] = sum(count_cpu_seconds(child.pid).values())
            memory[name] = process.memory_info().rss
        return cpu, memory

    def measure_tables(self) -> dict[str, int]:
        """Return the bytes of each table with its indexes."""
        with self.engine.connect() as connection:
            return {name: connection.execute(MEASURE, {"name": name}).scalar_one() for name in TABLES}

    def finish(self, job_id: Any, num_items: int, num_chunks: int) -> tuple[float, list[str]]:
        """Wait until the output is swept; return the seconds that took, and what is missing, twice or left over."""
        began = time.monotonic()
        while True:
            with self.engine.connect() as connection:
                output = connection.execute(FIND_OUTPUT, {"job_id": job_id}).one()
            if output.state == SWEPT:
                break
            if time.monotonic() > began + END_SECONDS:
                raise BenchmarkFailed(f"The output is still {output.state} after {END_SECONDS:.0f} s.")
            time.sleep(1.0)
        seconds = time.monotonic() - began
        with self.engine.connect() as connection:
            parts = connection.execute(COUNT_PARTS, {"job_id": job_id}).one()
        faults = []
        if (parts.num_rows, parts.num_first) != (num_items, parts.num_parts):
            faults.append(
                f"{parts.num_rows:,} rows in {parts.num_parts:,} parts of {num_items:,} in {num_chunks:,}"
            )
        url = f"file://{self._folder}/vectors"
        named = {part.name for part in vectormill.read_manifest(url).parts}
        there = {path.name for path in (self._folder / "vectors").glob("part-*")}
        if there - named:
            faults.append(f"{len(there - named):,} parts that the manifest does not name")
        keys = pq.read_table([str(self._folder / "vectors" / name) for name in there], columns=["key"])["key"]
        if (len(keys), len(keys.unique())) != (self._sample_end, self._sample_end):
            faults.append(f"{len(keys):,} rows of the sample, {len(keys.unique()):,} of them distinct")
        return seconds, faults

    def read_logs(self) -> tuple[list[float], list[float], int]:
        """Return the milliseconds of all claims and of all commits, and how many leases were lost."""
        claims: list[float] = []
        commits: list[float] = []
        num_lost = 0
        for path in self._directory.glob("fleet *.jsonl"):
            lines = [
                msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")
            ]
            claims += [each for line in lines for each in line["claims"]]
            commits += [each for line in lines for each in line["commits"]]
            num_lost += max((line["lost"] for line in lines), default=0)
        return claims, commits, num_lost


def watch(harness: Harness, site: Site, job_id: Any, num_chunks: int) -> Course:
    """Follow the job to its end, and kill a process at random now and then."""
    course, luck = Course(), random.Random(7)
    began = time.monotonic()
    next_kill, next_word = began + KILL_SECONDS, began
    used: dict[str, float] = {}  # of processes that were killed
    while True:
        with site.engine.connect() as connection:
            job = connection.execute(COUNT_OPEN, {"job_id": job_id}).one()
        cpu, memory = site.look()
        total = {name: seconds + used.get(name, 0.0) for name, seconds in cpu.items()}
        now = time.monotonic()
        course.moments.append(Moment(now - began, num_chunks - job.num_open_chunks, total, memory))
        if job.num_open_chunks == 0:
            if job.state != COMPLETED:
                raise BenchmarkFailed(f"The job ended as {job.state}.")
            return course
        course.round_ms.append(time_round(site.engine))
        if now >= next_word:
            harness.say(f"{num_chunks - job.num_open_chunks:,} of {num_chunks:,} chunks")
            next_word = now + 30.0
        # Leases of killed workers lapse after half a minute, so at the end nobody is killed any more.
        if now >= next_kill and job.num_open_chunks > (1 - STEADY_SHARE) * num_chunks:
            victim = luck.choice([name for name in site.names if name != "indexer"])
            used[victim] = total[victim]
            site.kill(victim)
            course.kills[victim.split()[0]] = course.kills.get(victim.split()[0], 0) + 1
            next_kill = now + KILL_SECONDS * luck.uniform(0.5, 1.5)
        time.sleep(POLL_SECONDS)


def time_round(engine: Engine) -> float:
    """Return the milliseconds of what a round of the dispatcher reads."""
    began = time.perf_counter()
    with engine.connect() as connection:
        models = [room.model for room in list_rooms(connection)]
        list_demands(connection, models, 500)
    return 1000 * (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Window:
    """Some ten thousand chunks: their rate, and the processor seconds and bytes of each process."""

    first: Moment
    last: Moment

    @property
    def num_chunks(self) -> int:
        return max(1, self.last.num_done - self.first.num_done)

    def micros(self, name: str) -> float:
        """Return the processor time of a chunk in microseconds, of processes whose names begin so."""
        spent = sum(
            seconds - self.first.cpu.get(process, 0.0)
            for process, seconds in self.last.cpu.items()
            if process.startswith(name)
        )
        return 1e6 * spent / self.num_chunks

    @property
    def rate(self) -> float:
        return self.num_chunks / max(1e-9, self.last.seconds - self.first.seconds)


def find_window(course: Course, start: int) -> Window:
    """Return the window that begins when `start` chunks were done."""
    moments = [each for each in course.moments if each.num_done] or course.moments
    first = max(
        (each for each in moments if each.num_done <= start),
        default=moments[0],
        key=lambda each: each.seconds,
    )
    last = next((each for each in moments if each.num_done >= first.num_done + WINDOW_CHUNKS), moments[-1])
    return Window(first, last)


def report(
    num_items: int,
    num_chunks: int,
    submission_seconds: float,
    end_seconds: float,
    course: Course,
    windows: tuple[Window, Window],
    sizes: tuple[Mapping[str, int], Mapping[str, int]],
    answers: tuple[list[float], list[float]],
    num_lost: int,
    faults: list[str],
) -> Report:
    first, last = windows
    whole = Window(next(each for each in course.moments if each.num_done), course.moments[-1])
    claims, commits = answers
    cost = sum(whole.micros(name) for name in ("postgres", "scheduler", "indexer"))
    carried = 1e6 * len(os.sched_getaffinity(0)) / cost
    growth = last.micros("postgres") / max(1e-9, first.micros("postgres"))
    kills = ", ".join(f"{name} {count}" for name, count in sorted(course.kills.items())) or "none"
    early, late = first.last.memory, last.last.memory
    processes = ("postgres", "scheduler", "indexer", "fleet")
    return Report(
        f"{num_items:,} items by reference in {num_chunks:,} chunks, {NUM_OTHER_JOBS:,} other open jobs, "
        f"{NUM_WORKERS:,} workers with {SLOTS} slots in {NUM_PROCESSES} processes over "
        f"{NUM_PROCESSES * (CONNECTIONS + 1)} connections; a device takes {DEVICE_SECONDS:g} s for a chunk. "
        f"Killed: {kills}.",
        (
            tabulate(
                [
                    told("chunks/s, beside the simulation", whole.rate, NUMBER),
                    at_least("chunks/s, if the cores had nothing else to do", carried, 1000, NUMBER),
                    at_most(
                        "Postgres' time for a chunk at the end, to that at the beginning", growth, 1.2, NUMBER
                    ),
                    at_most("faults: missing, twice or left over", len(faults), 0, NUMBER),
                    at_most("tables in MiB", sum(sizes[1].values()) / (1 << 20), 2000, NUMBER),
                    told("leases that were lost", num_lost, NUMBER),
                    told("claim, p50 in ms", find_percentile(claims, 50), NUMBER),
                    told("claim, p99 in ms", find_percentile(claims, 99), NUMBER),
                    told("commit, p50 in ms", find_percentile(commits, 50), NUMBER),
                    told("commit, p99 in ms", find_percentile(commits, 99), NUMBER),
                    told(
                        "what a dispatcher's round reads, p50 in ms",
                        find_percentile(course.round_ms, 50),
                        NUMBER,
                    ),
                    told(
                        "what a dispatcher's round reads, p99 in ms",
                        find_percentile(course.round_ms, 99),
                        NUMBER,
                    ),
                    told("submission in s", submission_seconds, NUMBER),
                    told("manifest and sweep in s", end_seconds, NUMBER),
                ]
            ),
            Table(
                ("processor time in µs a chunk", *processes),
                tuple(
                    (name, *(NUMBER(window.micros(each)) for each in processes))
                    for name, window in (
                        (f"first {first.num_chunks:,} chunks", first),
                        (f"last {last.num_chunks:,} chunks", last),
                        ("all", whole),
                    )
                ),
            ),
            Table(
                ("table with its indexes", "after the submission", "at the end"),
                tuple((name, MEBIBYTES(sizes[0][name]), MEBIBYTES(sizes[1][name])) for name in TABLES),
            ),
            Table(
                ("resident memory", "early", "late"),
                tuple((name, MEBIBYTES(early[name]), MEBIBYTES(late[name])) for name in sorted(late)),
            ),
        ),
        (
            "Workers claim, renew, beat and commit by the product's own statements; they take messages from Valkey "
            "with BRPOP and without Celery. Fleet is the simulation itself, which shares the cores with the rest.",
            f"Of the first {min(NUM_SAMPLE, num_items):,} items real Parquet parts are written and compared at the "
            "end; of the others the part is recorded and no object is written.",
            *faults,
        ),
    )
