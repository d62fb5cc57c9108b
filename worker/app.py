"""One replica: a Celery worker pinned to one device, and the engine that its threads feed.

This module is the composition root. worker.launcher starts it, with its number of threads in the environment.
torch, and the variables that pin it to one device, are only in the engine's Runner process, never here.
"""

import argparse
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from celery import Celery
from celery.signals import worker_shutting_down
from celery.worker import state
from celery.worker.consumer import Consumer
from rich.console import Console

from vectormill.broker.app import ENCODE_CHUNK, make_app, queue_of
from vectormill.broker.doorbell import WakeUpSender
from vectormill.broker.queries import QUERY_KEY, QueryConsumer, Signer, name_space
from vectormill.broker.queues import QueueReader
from vectormill.db.session import load_secret, make_engine
from vectormill.domain.errors import ConfigurationError, ModelError
from vectormill.files.roots import Roots
from vectormill.models.registry import open_registry
from vectormill.processes.logs import begin_logging, reform_handlers
from vectormill.settings import Settings, find_collector, load_settings
from vectormill.tracing import begin_tracing
from worker.certificates.certificate import Certificate
from worker.certificates.measuring import check_loaded, find_certificate
from worker.chunk.chunk_encoder import ChunkEncoder, Result
from worker.chunk.commit import PostgresSink
from worker.chunk.counts import ChunkCounts, Timesheet
from worker.chunk.leases import LeaseKeeper
from worker.chunk.proving import Prover
from worker.chunk.watchdog import Watchdog
from worker.devices.core_waits import CoreWaits
from worker.devices.detect import DeviceSampler, describe_shared_memory
from worker.devices.device import CUDA
from worker.encoder.memory import keep_large_blocks_apart
from worker.engine.engine import Engine
from worker.engine.executor import DEAD
from worker.identity import EndedWorker, FailureNotice, WorkerIdentity, release_chunks_of, take_name
from worker.loading import LoadingDisplay
from worker.messages import forget_foreign_tasks
from worker.placement.placement import Assignment, read_assignment
from worker.placement.strategies import REPLICATE
from worker.plan import follow_plan
from worker.queries import QueryListener
from worker.report import ReportMaker, WorkerReport, read_losses
from worker.runner.starter import Sharing
from worker.settings import WorkerSettings, find_cache_dir, load_worker_settings
from worker.tuning.self_tuning import SelfTuning

logger = logging.getLogger(__name__)

# With the connection for leases, a worker has at most six connections (docs/POSTGRES.md, "Connections").
# Its slots need one only for moments, and wait for their turn.
POOL_SIZE = 5
# The cause of a failed load may pass, such as a lack of memory, but each failed load costs minutes of all
# cores.
FIRST_LOAD_PAUSE_SECONDS = 30.0
LONGEST_LOAD_PAUSE_SECONDS = 600.0
# Each chunk causes three events. Sent alone, each is a message to Redis, which together is a third of a
# chunk's cost for messages. Flower can wait this long, or for 24 events.
FLUSH_SECONDS = 0.25


def main() -> None:
    """Run one replica, as `vectormill worker` starts it: `python -m worker.app --model NAME --assignment JSON`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--assignment",
        required=True,
        type=read_assignment,
        help="the replica and its devices, as planned",
    )
    parser.add_argument(
        "--launcher",
        type=UUID,
        default=uuid4(),
        help="the `vectormill worker` run that this process belongs to",
    )
    parser.add_argument("--incarnation", type=UUID, default=uuid4(), help="the id of this start")
    parser.add_argument(
        "--ended",
        type=EndedWorker.parse,
        action="append",
        default=[],
        help="an earlier process that has ended, as INCARNATION=STATUS",
    )
    parser.add_argument("--losses", type=Path, default=None, help="a file with a line for each lost GPU")
    parser.add_argument("--bar", action="store_true", help="show a progress bar while the model loads")
    options = parser.parse_args()
    settings = load_settings()
    begin_logging("worker", settings.log_level, settings.log_format)
    begin_tracing("worker", find_collector(settings), settings.trace_ratio)
    keep_large_blocks_apart()
    console = Console(stderr=True) if options.bar else None
    display = LoadingDisplay(options.model, console)
    worker_settings = load_worker_settings()
    pin_process(options.assignment.cores)
    devices = "+".join(device.name.replace(":", "") for device in options.assignment.devices)
    identity = WorkerIdentity(
        name=f"{options.model}-{devices}@{socket.gethostname()}",
        incarnation=options.incarnation,
        launcher=options.launcher,
        model=options.model,
        slots=worker_settings.slots,
    )
    losses = partial(read_losses, options.losses)
    run_replica(settings, worker_settings, identity, options.assignment, options.ended, display, losses)


def pin_process(cores: Collection[int]) -> None:
    """Pin all threads to these cores, so that tokenizing happens near the texts and the model's process."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def run_replica(
    settings: Settings,
    worker_settings: WorkerSettings,
    identity: WorkerIdentity,
    assignment: Assignment,
    ended: Sequence[EndedWorker],
    display: LoadingDisplay,
    losses: Callable[[], list[str]],
) -> None:
    """Load the model, then consume its queue until SIGTERM."""
    database_url, redis_url = settings.need("database_url"), settings.need("redis_url")
    card = open_registry(settings).card(identity.model, weights=True)
    devices = assignment.devices
    worker_settings = follow_plan(worker_settings, card, assignment)
    slots = worker_settings.slots + worker_settings.interactive_slots
    heart = make_engine(database_url, application_name=f"{identity.name} leases", pool_size=1, max_overflow=0)
    # This is done before the model is loaded, because loading may take longer than a lease.
    release_chunks_of(ended, heart)
    stopping = threading.Event()
    cache_dir = find_cache_dir(settings)
    is_whole = assignment.replica.strategy == REPLICATE
    sharing = None if is_whole else Sharing(assignment.replica, devices)
    if lack := describe_shared_memory(devices):
        logger.warning("%s", lack)
    make_one = partial(
        Engine,
        card,
        devices[0],
        worker_settings,
        cache_dir,
        sharing=sharing,
        longest_text_tokens=assignment.replica.longest_text_tokens,
        query_timeout_seconds=settings.search_timeout_seconds,
        display=display,
    )
    certificate = find_certificate(settings.data_dir, card)
    notice = FailureNotice(heart, identity, settings.heartbeat_seconds, losses)
    check = partial(check_way, certificate=certificate)
    engine = start_engine(make_one, notice, check=check)
    waits = CoreWaits(devices[0], engine.find_pid)
    timesheet = Timesheet(lambda: engine.run_seconds, read_starved_seconds=waits.read)
    counts = ChunkCounts()
    samplers = {
        each.name: DeviceSampler(each, partial(engine.find_pid, rank)) for rank, each in enumerate(devices)
    }
    report = WorkerReport(engine, timesheet, samplers, assignment.part, counts=counts, losses=losses)
    reports = ReportMaker(report.compose, settings.heartbeat_seconds)
    identity = take_name(heart, identity, reports.make())
    database = make_engine(database_url, application_name=identity.name, pool_size=POOL_SIZE, max_overflow=0)
    keeper = LeaseKeeper(
        heart,
        identity,
        reports.latest,
        heartbeat_seconds=settings.heartbeat_seconds,
        lease_seconds=settings.lease_seconds,
    )
    # The process of a faulty model ends as when asked to: chunks are handed back, and the launcher starts another.
    end = partial(os.kill, os.getpid(), signal.SIGTERM)
    prover = Prover(database, engine, identity, worker_settings.proof_seconds, end)
    # On a processor it would take the cores of service; there `vectormill tune` compares the ways.
    tuning = SelfTuning(engine, prover, check) if sharing is None and devices[0].kind == CUDA else None
    doorbell = WakeUpSender(redis_url)

    def ask_for_more() -> None:
        # Early enough to stay busy, but several at once.
        if keeper.num_held_tokens <= engine.max_tokens_in_flight // 2:
            doorbell.ring()

    encoder = ChunkEncoder(
        database,
        engine,
        keeper,
        PostgresSink(database, stopping, settings.lease_seconds, counts, Roots.of(settings, "output_root")),
        timesheet,
        identity,
        settings,
        ask_for_more,
        counts,
        prover.read_period,
    )
    spaces = [name_space(card.name, each, "+".join(card.pooling)) for each in card.revisions]
    consumer = QueryConsumer(redis_url, spaces, identity.owner, Signer(*load_secret(heart, QUERY_KEY)))
    listener = QueryListener(consumer, engine, identity.owner)
    queues = QueueReader(redis_url)
    watchdog = Watchdog(queues, identity.model, keeper, engine, lambda: state.all_total_count[0])
    reports.start()
    keeper.start()
    prover.start()
    if tuning is not None:
        tuning.start()
    watchdog.start()
    listener.start()

    def stop_encoding() -> None:
        listener.stop()
        engine.stop()

    def stop_engine(**_: object) -> None:
        # Celery's signal handler calls this. Chunks are handed back from a thread; then Celery finds its
        # slots empty.
        stopping.set()
        threading.Thread(target=stop_encoding, name="stop", daemon=True).start()

    worker_shutting_down.connect(stop_engine, weak=False)
    try:
        consume(make_app(redis_url), encoder, identity, slots)
    finally:
        stopping.set()
        if tuning is not None:
            tuning.stop()
        prover.stop()
        watchdog.stop()
        listener.stop()
        reports.stop()
        engine.stop()
        keeper.stop()
        database.dispose()
        heart.dispose()
        queues.close()
        doorbell.close()


def start_engine(
    make: Callable[[], Engine],
    notice: FailureNotice,
    wait: Callable[[float], object] = time.sleep,
    check: Callable[[Engine], object] = lambda engine: None,
) -> Engine:
    """Start an engine and return it. If its model cannot be loaded, report that and try a new engine.

    `check` raises ModelError if the loaded model is not what it should be, which is reported and tried again too.

    The pause before each new attempt is twice as long as the one before.
    """
    pause = FIRST_LOAD_PAUSE_SECONDS
    try:
        while True:
            engine = make()
            try:
                engine.start()
                check(engine)
            except ModelError as error:
                notice.tell({**engine.report(), "state": DEAD, "state_reason": str(error)})
                engine.stop()
                logger.error("The model could not be loaded; retrying in %.0f s: %s", pause, error)
                wait(pause)
                pause = min(2 * pause, LONGEST_LOAD_PAUSE_SECONDS)
            else:
                return engine
    finally:
        notice.end()


def check_way(engine: Engine, certificate: Certificate | None) -> None:
    """Raise ModelError if the loaded model leaves its certificate. A measured way is then not used again."""
    try:
        note = check_loaded(engine, certificate)
    except ModelError as error:
        engine.refuse_way(str(error))
        raise
    engine.way_note = "; ".join(each for each in (engine.way_note, note) if each)


class BufferingConsumer(Consumer):
    """A consumer of Celery that sends its events for Flower in groups.

    Celery cancels the timer with its loop.
    """

    def register_with_event_loop(self, hub: Any) -> None:
        super().register_with_event_loop(hub)
        hub.call_repeatedly(FLUSH_SECONDS, self._flush_events)

    def on_send_event_buffered(self) -> None:
        """Do nothing. Celery would flush the events in the next turn of its loop."""


def consume(app: Celery, encoder: ChunkEncoder, identity: WorkerIdentity, slots: int) -> None:
    """Register the task and run the Celery worker in this thread until it is stopped."""

    forget_foreign_tasks(app)

    @app.task(name=ENCODE_CHUNK, Strategy="worker.messages:handle_dispatches")
    def encode_chunk(chunk_id: int, dispatch_seq: int) -> Result:
        return encoder.encode_chunk(chunk_id)

    # `worker_main` is not used: it is Celery's command line and loads 200 modules and 15 MiB to parse these
    # arguments.
    worker = app.Worker(
        hostname=identity.name,
        pool_cls="threads",
        consumer_cls=BufferingConsumer,
        concurrency=slots,
        queues=[queue_of(identity.model)],
        without_gossip=True,
        without_mingle=True,
        heartbeat_interval=10,
        task_events=True,
        loglevel="WARNING",
    )
    reform_handlers("worker")
    worker.start()


if __name__ == "__main__":
    try:
        main()
    except (ConfigurationError, ModelError) as error:
        logger.error("%s", error)
        raise SystemExit(2) from error
